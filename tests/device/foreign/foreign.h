// SPDX-License-Identifier: Apache-2.0
// foreign.h: kernels of a library that knows nothing of ours (foreign.cu), for test_memory_foreign.py.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

extern "C" {
// out[i] = in[i] * factor for i in [begin, end)
void foreign_scale(const float* in, float* out, float factor, int64_t begin, int64_t end,
                   cudaStream_t stream);
// Keep the stream busy for so many cycles of the GPU's clock, then fill.
void foreign_slow_fill(float* out, float value, int64_t begin, int64_t end, int64_t cycles,
                       cudaStream_t stream);
// Prefetch [data, data + bytes) to a GPU (or -1: the host), by the batched call where there is one.
cudaError_t foreign_prefetch(void* data, int64_t bytes, int gpu, int batched, cudaStream_t stream);
}
