#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# sanitize.sh [FOLDER]: compute-sanitizer's memcheck and racecheck over check_stages (built in FOLDER, which keeps the logs)
# and over the tests marked `sanitize`, on one GPU with three shards. About three minutes. TOOLS chooses, as in
# TOOLS=memcheck.
set -u
cd "$(dirname "$0")/.."
folder=${1:-$(mktemp -d)}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} MGPU_DEVICES=0,0,0 MGPU_REQUIRE_GPU=1
bash tests/cuda/build.sh "$folder" > /dev/null || exit 1
bad=0
for tool in ${TOOLS:-memcheck racecheck}; do
  # --report-api-errors no: that memory is out is an answer that the device and its tests ask the driver for
  check="compute-sanitizer --tool $tool --error-exitcode 9"
  [ "$tool" = memcheck ] && check="$check --report-api-errors no"
  for part in stages tests; do
    log=$folder/$tool-$part.txt
    if [ $part = stages ]; then
      # every block from the driver, so that its ends are seen
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 $check "$folder/check_stages" small > "$log" 2>&1
    else
      $check "$python" -m pytest -q -m sanitize --timeout=0 tests/device tests/splats > "$log" 2>&1
    fi
    code=$?
    [ $code -eq 0 ] || bad=1
    echo "== $tool, $part: exit $code, all of it in $log"
    grep -E "failures|passed|failed|SUMMARY|^FAILED|^ERROR" "$log"
    [ $code -eq 0 ] || grep -m 60 -E "^=========|^E  |^(tests|ns_mgpu_splat)/[a-z_/]*\.py:" "$log"
  done
done
exit $bad
