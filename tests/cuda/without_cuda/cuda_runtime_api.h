// SPDX-License-Identifier: Apache-2.0
// The little of CUDA's runtime that mesh/lanes_cuda.cpp names, for machines without CUDA.
#pragma once

using cudaError_t = int;
using cudaStream_t = void*;
inline cudaError_t cudaSetDevice(int) { return 0; }
