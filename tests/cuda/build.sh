#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# build.sh FOLDER: compile check_stages and the torch-free part of the CUDA flavour into FOLDER, and the drivers of
# benchmarks/*_variants.py, so that they are not forgotten, into FOLDER/drivers. JOBS compilers at a time.
set -eu
cd "$(dirname "$0")/../.."
out=$1
mkdir -p "$out/drivers"
exec 9> "$out/lock"
flock 9  # the sanitizer's tools run side by side, and both build first
cuda=${CUDA_HOME:-/usr/local/cuda}
arch=${MGPU_CUDA_ARCHS:-90}
sources="cuda/splat/*.cu cuda/splat/*_cuda.cpp cuda/splat/assign.cpp cuda/splat/patches.cpp cuda/splat/tile_owners.cpp cuda/splat/pixels.cpp cuda/splat/cells.cpp cuda/splat/curve.cpp cuda/splat/ranges.cpp cuda/splat/transport.cpp cuda/splat/links.cpp cuda/splat/exchange.cpp cuda/splat/fates.cpp cuda/splat/gather.cpp cuda/splat/loss_items.cpp
  cuda/splat/history.cpp cuda/splat/reorder.cpp cuda/splat/rows.cpp cuda/splat/step_check.cpp
  cuda/mesh/mesh.cpp cuda/mesh/fork_join.cpp cuda/mesh/fork_join_cuda.cpp cuda/mesh/gate.cpp cuda/mesh/lanes_cuda.cpp
  cuda/memory/homes.cpp cuda/memory/tally.cpp cuda/memory/vmm_cuda.cpp cuda/memory/buffer_cuda.cpp cuda/memory/transfer_cuda.cpp tests/cuda/check_stages.cpp benchmarks/*_stage.cu"
compile() {
  object=$out/$(basename "$1").o
  case $1 in benchmarks/*) object=$out/drivers/$(basename "$1").o ;; esac
  if [ "$object" -nt "$1" ] && [ -z "$(find cuda -name '*.h' -newer "$object")" ]; then return; fi
  case $1 in
    *.cu) "$cuda/bin/nvcc" -std=c++20 -O3 -gencode=arch=compute_$arch,code=sm_$arch --expt-relaxed-constexpr --extended-lambda \
      -lineinfo -Icuda -DMGPU_CUDA=1 -c "$1" -o "$object" ;;
    *) g++ -std=c++20 -O2 -Wall -Wno-unknown-pragmas -Wno-psabi -Icuda -I"$cuda/include" -DMGPU_CUDA=1 -c "$1" -o "$object" ;;
  esac
}
export -f compile
export out cuda arch
# shellcheck disable=SC2086
ls $sources | xargs -P "${JOBS:-$(nproc)}" -I{} bash -c 'compile {}'
"$cuda/bin/nvcc" -gencode=arch=compute_$arch,code=sm_$arch "$out"/*.o -o "$out/check_stages.new" -lpthread
mv "$out/check_stages.new" "$out/check_stages"  # another process may be running the one before
echo "$out/check_stages"
