// SPDX-License-Identifier: Apache-2.0
// copy.cpp: copies between mgpu tensors, and between mgpu and the CPU, with casts and broadcasts; large ones
// by shard. at::copy_, clone, contiguous, to, and everything made of them arrive here.
#include "backend/operators.h"

#include <ATen/ops/_copy_from_ops.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/resize_ops.h>

#include "backend/alias.h"
#include "backend/flavour.h"
#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu::ops {

namespace {

bool copy_by_shard(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (one_part_runs_whole()) return false;
  if (!is_large(from) && !is_large(to)) return false;
  if (from.layout() != c10::kStrided || from.device().type() == c10::DeviceType::Meta) return false;
  const at::Tensor operands[] = {from, to};
  const auto shape = broadcast_shape(operands);
  if (!shape || to.sizes() != c10::IntArrayRef(*shape)) return false;
  Aliases aliases;
  const at::Tensor parts[] = {aliases.to_backing(from), aliases.to_backing(to)};
  if (overlaps(parts[1], parts[0])) return false;
  const auto cut = ElementwiseCut::of(parts, *shape, /*flat_only=*/false);
  if (!cut) return false;
  run_on_parts([&](int part) {
    const RowRange range = cut->range(part);
    if (range.empty()) return;
    at::Tensor out = cut->slice(parts[1], range);
    at::_ops::copy_::call(out, cut->slice(parts[0], range), non_blocking);
  });
  return true;
}

}  // namespace

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  static Operator& entry = operator_entry("aten::_copy_from");
  BelowAutograd below_autograd;
  const bool large = is_large(self) || is_large(dst);
  if (copy_by_shard(self, dst, non_blocking)) {
    count_run(entry, Run::kSharded, large);
    return dst;
  }
  OperatorScope scope;
  Aliases aliases;
  at::Tensor out = aliases.to_backing(dst);
  at::_ops::copy_::call(out, aliases.to_backing(self), non_blocking);
  count_run(entry, large && one_part_runs_whole() ? Run::kSharded : Run::kLead, large);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::_ops::resize_::call(dst, c10::fromIntArrayRefSlow(self.sizes()), std::nullopt);
  return copy_from(self, dst, false);
}

}  // namespace mgpu::ops
