// SPDX-License-Identifier: Apache-2.0
// waits_cuda.h: how long read-backs (transfer.h) were waited for.
#pragma once

namespace mgpu {

// By this thread, so far.
double seconds_waited();

}  // namespace mgpu
