// SPDX-License-Identifier: Apache-2.0
// late.h: for tests of the order between GPUs (CUDA flavour): make one GPU late with all that it is given, so
// that whoever does not wait for it reads what is not there yet.
#pragma once
#include <cuda_runtime_api.h>

namespace mgpu {

// From now on `gpu` waits so many microseconds before each operator and each stage, and after each join; -1:
// no GPU does.
void set_late_gpu(int gpu, int microseconds);

// Called before work is given to a GPU's stream: nothing, unless this GPU is to be late.
void be_late(int gpu, cudaStream_t stream);

}  // namespace mgpu
