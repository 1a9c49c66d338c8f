// SPDX-License-Identifier: Apache-2.0
// host_device.h: marks a function that both flavours compile.
#pragma once

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__ __attribute__((always_inline))  // callers add `inline`
#define RARE_HOST_DEVICE \
  __host__ __device__ __noinline__  // likewise; out of line, so that it costs no registers
#else
#define HOST_DEVICE
#define RARE_HOST_DEVICE
#endif
