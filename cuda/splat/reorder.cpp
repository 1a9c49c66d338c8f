// SPDX-License-Identifier: Apache-2.0
#include "splat/reorder.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace mgpu::splat {

RowDeal row_deal(const std::vector<RowRange>& ranges, int64_t stripe_rows, int64_t num_rows) {
  if (stripe_rows < 1)
    throw std::invalid_argument("stripe is " + std::to_string(stripe_rows) + " rows, expected at least 1.");
  if (ranges.empty() || ranges.size() > static_cast<size_t>(mgpu::kMaxShards)) {
    throw std::invalid_argument("deal has " + std::to_string(ranges.size()) +
                                " ranges of rows, expected 1 to " + std::to_string(mgpu::kMaxShards) + ".");
  }
  RowDeal deal;
  int64_t next = 0, most = 1;
  for (const RowRange& range : ranges) {
    const bool begins_well = range.begin == next && (range.empty() || next % RowDeal::kUnit == 0);
    if (!begins_well || range.end < range.begin) {
      throw std::invalid_argument(
          "deal[" + std::to_string(deal.ranges) + "] is (" + std::to_string(range.begin) + ", " +
          std::to_string(range.end) + "), expected a range from row " + std::to_string(next) +
          " on; all but empty ones begin at multiples of " + std::to_string(RowDeal::kUnit) + ".");
    }
    deal.range[deal.ranges++] = range;
    most = std::max(most, range.size());
    next = range.end;
  }
  if (next != num_rows) {
    throw std::invalid_argument("deal ends at row " + std::to_string(next) + ", and the table has " +
                                std::to_string(num_rows) + " rows.");
  }
  deal.rounds = 1 + (most - 1) / stripe_rows;  // rounded up; a sum with stripe_rows might not fit
  return deal;
}

}  // namespace mgpu::splat
