// SPDX-License-Identifier: Apache-2.0
// host_device.h: marks a function that both flavours compile.
#pragma once

#if defined(__CUDACC__)
#define HOST_DEVICE __host__ __device__ __attribute__((always_inline))  // callers add `inline`
#else
#define HOST_DEVICE
#endif
