// SPDX-License-Identifier: Apache-2.0
// growth.h: tensors that can grow in place, and the pages that tensors lie on.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace mgpu {

// A zeroed tensor of `shape` whose first dimension can grow to `capacity_rows` without moving.
at::Tensor reserve(const std::vector<int64_t>& shape, int64_t capacity_rows, c10::ScalarType dtype);

// Let a reserved tensor have `rows` rows, in place: same object, same address, new rows zero. Refused, with
// the reason, if it was not reserved, is a view or has one, is part of a graph, has a .grad, would shrink, or
// has no capacity left.
void grow(const at::Tensor& tensor, int64_t rows);

// Let a reserved tensor have its first `rows` rows only, in place; the memory is kept for growing again.
// Refused like grow.
void shrink(const at::Tensor& tensor, int64_t rows);

// One entry per page that the tensor's elements touch: its shard, or -1 while it is in host memory.
at::Tensor placement(const at::Tensor& tensor);

// Move the tensor's pages: shards[page], -1 for host memory.
void place(const at::Tensor& tensor, const std::vector<int64_t>& shards);

// Say which rows are whose (ascending ranges without gaps, one a shard), and move the tensor's pages so: each
// to the home of the byte in its middle. Returns how many pages have moved.
int64_t place_rows(const at::Tensor& tensor, const std::vector<std::pair<int64_t, int64_t>>& homes);
// The ranges as they are; equal chunks if nothing was said.
std::vector<std::pair<int64_t, int64_t>> row_homes_of(const at::Tensor& tensor);

// Park pages in host memory, and bring them back to the shards they came from; nullopt: all pages.
void to_host(const at::Tensor& tensor, const std::optional<std::vector<int64_t>>& pages);
void to_device(const at::Tensor& tensor, const std::optional<std::vector<int64_t>>& pages);

}  // namespace mgpu
