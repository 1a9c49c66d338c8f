// SPDX-License-Identifier: Apache-2.0
// split_random.cpp: large fills with random numbers. A tensor is filled in chunks whose length depends on its
// own length alone, each with numbers of its own (ChunkedNumbers), so that any mesh gives the same ones. A
// tensor of one chunk is filled on the lead shard, with the numbers that torch's backing device would give.
#include <ATen/core/Tensor.h>
#include <ATen/ops/bernoulli_ops.h>
#include <ATen/ops/mul_ops.h>

#include "backend/fallback.h"
#include "backend/flavour.h"
#include "backend/generator.h"
#include "backend/shards.h"
#include "backend/split.h"

namespace mgpu {

namespace {

constexpr int64_t kSmallestChunk = int64_t{1} << 22;  // elements; a GPU is busy with so many for about 6 us
constexpr int64_t kMostChunks =
    8;  // each ends with a GPU that is partly idle: 16 cost 16 % of a fill of 1 GiB

int64_t chunk_of(int64_t count) {
  int64_t chunk = kSmallestChunk;
  while (chunk * kMostChunks < count) chunk *= 2;
  return chunk;
}

Outcome dropout(CutCall& call) {
  const at::Tensor input = call.tensor("input");
  const c10::IValue& train = call.argument("train");
  const double p = call.argument("p").toDouble();
  if (input.numel() <= kSmallestChunk || p <= 0.0 || p >= 1.0 || (train.isBool() && !train.toBool()) ||
      !input.unsafeGetTensorImpl()->is_non_overlapping_and_dense())
    return Outcome::kWhole;
  at::Tensor mask = empty_mgpu(input.sizes(), input.strides(), at::kBool);
  at::_ops::bernoulli__float::call(mask, 1.0 - p, std::nullopt);
  at::Tensor output = at::_ops::mul_Tensor::call(input, mask);
  at::_ops::mul__Scalar::call(output, 1.0 / (1.0 - p));
  call.give({output, mask});
  return Outcome::kDone;
}

}  // namespace

Outcome run_random(const Operator& entry, torch::jit::Stack* stack) {
  CutCall call(entry, stack);
  if (!call.can_be_cut()) return Outcome::kWhole;
  if (entry.base_name == "aten::native_dropout") return dropout(call);
  const at::Tensor self = call.tensor("self");
  const at::Tensor p = call.tensor("p");
  const int64_t count = self.numel();
  const int64_t chunk = chunk_of(count);
  if (entry.generator_argument < 0 || count <= chunk ||
      !self.unsafeGetTensorImpl()->is_non_overlapping_and_dense())
    return Outcome::kWhole;
  if (p.defined() && (p.sizes() != self.sizes() || p.strides() != self.strides() || p.is_alias_of(self)))
    return Outcome::kWhole;
  const auto generator_at = static_cast<size_t>(entry.generator_argument);
  const c10::IValue generator = backing_value(entry, generator_at, call.argument("generator"));
  const torch::jit::Stack given(stack->end() - static_cast<int64_t>(entry.writes.size()), stack->end());
  Aliases aliases;
  const at::Tensor to = aliases.to_backing(self);
  const at::Tensor chances = p.defined() ? aliases.to_backing(p) : p;
  const int64_t chunks = (count + chunk - 1) / chunk;
  auto stretch = [&](const at::Tensor& tensor, int64_t at) {
    return make_view(tensor.storage(), tensor.key_set(), tensor.dtype(),
                     {std::min(chunk, count - at * chunk)}, {1}, tensor.storage_offset() + at * chunk);
  };
  ChunkedNumbers numbers(generator.toGenerator(), chunk, chunks);
  run_on_parts([&](int part) {
    const RowRange mine = part_range(chunks, part);
    for (int64_t at = mine.begin; at < mine.end; ++at) {
      torch::jit::Stack one;
      for (size_t i = 0; i < given.size(); ++i) {
        if (i == 0)
          one.emplace_back(stretch(to, at));
        else if (i == generator_at)
          one.emplace_back(numbers.of_chunk(at));
        else if (given[i].isTensor() && chances.defined())
          one.emplace_back(stretch(chances, at));
        else
          one.push_back(backing_value(entry, i, given[i]));
      }
      call_backing(*entry.handle, &one);
    }
  });
  call.give({self});
  return Outcome::kDone;
}

}  // namespace mgpu
