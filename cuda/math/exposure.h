// SPDX-License-Identifier: Apache-2.0
// exposure.h: an affine map of colours, as of a photograph's exposure and white balance, with its adjoint.
#pragma once
#include "math/host_device.h"
#include "math/vec.h"

namespace mgpu::math {

// A map is [3, 4], row-major: out[i] = sum over j of map[4 i + j] in[j] + map[4 i + 3].
constexpr int kExposureFloats = 12;

// What leaves every colour as it is.
HOST_DEVICE inline float identity_exposure(int i) { return i % 5 == 0 ? 1.0f : 0.0f; }

HOST_DEVICE inline void expose(const float* map, const float* in, float* out) {
  for (int i = 0; i < 3; ++i) {
    const float* row = map + 4 * i;
    out[i] = mul_add(row[0], in[0], mul_add(row[1], in[1], mul_add(row[2], in[2], row[3])));
  }
}

// dL_din may be dL_dout; what the pixel says of the map is added to `sum` [12].
template <typename Sum>
HOST_DEVICE inline void expose_backward(const float* map, const float* in, const float* dL_dout,
                                        float* dL_din, Sum* sum) {
  const float out[3] = {dL_dout[0], dL_dout[1], dL_dout[2]};
  for (int i = 0; i < 3; ++i) {
    for (int j = 0; j < 3; ++j) sum[4 * i + j] += out[i] * in[j];
    sum[4 * i + 3] += out[i];
  }
  for (int j = 0; j < 3; ++j)
    dL_din[j] = mul_add(map[j], out[0], mul_add(map[4 + j], out[1], map[8 + j] * out[2]));
}

}  // namespace mgpu::math
