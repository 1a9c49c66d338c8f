// SPDX-License-Identifier: Apache-2.0
// bindings_links.h: what went over the links, for Python.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include "splat/links.h"

namespace mgpu::splat {

// records, gradients, pixels: lists [from][to] of bytes; records_sent, remote_rows, visible_rows; load by
// owner, in pairs of (tile, record); imbalance: largest load / mean load.
pybind11::dict dict_of(const FrameLinks& links);

}  // namespace mgpu::splat
