#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# sanitize.sh [FOLDER]: compute-sanitizer's memcheck and racecheck over check_stages (built in FOLDER) and over the tests
# marked `sanitize`, on one GPU with three shards. About three minutes. TOOLS chooses, as in TOOLS=memcheck.
set -u
cd "$(dirname "$0")/.."
folder=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} MGPU_DEVICES=0,0,0 MGPU_REQUIRE_GPU=1
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # every block from the driver, so that its ends are seen
bash tests/cuda/build.sh "$folder" > /dev/null || exit 1
bad=0
for tool in ${TOOLS:-memcheck racecheck}; do
  check="compute-sanitizer --tool $tool --error-exitcode 9"
  echo "== $tool: stages"
  $check "$folder/check_stages" small | grep -E "failures|SUMMARY|^=========" || bad=1
  [ "${PIPESTATUS[0]}" -eq 0 ] || bad=1
  echo "== $tool: tests marked sanitize"
  $check "$python" -m pytest -q -m sanitize --timeout=0 tests/device tests/splats | tail -n 15
  [ "${PIPESTATUS[0]}" -eq 0 ] || bad=1
done
exit $bad
