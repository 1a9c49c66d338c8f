// SPDX-License-Identifier: Apache-2.0
#include "splat/rows.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include "memory/transfer.h"

namespace mgpu::splat {

RowList consecutive_rows(int64_t begin, int64_t end) {
  RowList list;
  list.first = begin;
  list.count = std::max<int64_t>(0, end - begin);
  return list;
}

RowList row_list(const std::vector<int64_t>& rows, int64_t num_rows, const char* name) {
  const bool ascending = std::is_sorted(rows.begin(), rows.end());
  if (!ascending || (!rows.empty() && (rows.front() < 0 || rows.back() >= num_rows))) {
    throw std::invalid_argument(std::string(name) + " must ascend and lie in [0, " +
                                std::to_string(num_rows) + ").");
  }
  RowList list;
  list.row = to_buffer(rows, kExchange);
  list.count = static_cast<int64_t>(rows.size());
  return list;
}

void check_pairs(const RowList& source, const RowList& destination) {
  if (source.count != destination.count) {
    throw std::invalid_argument("relocate got " + std::to_string(source.count) + " source rows for " +
                                std::to_string(destination.count) + " destination rows.");
  }
}

std::vector<int64_t> to_vector(const RowList& list) {
  if (list.row.size() > 0) return mgpu::to_vector(list.row);
  std::vector<int64_t> rows(static_cast<size_t>(list.count));
  std::iota(rows.begin(), rows.end(), list.first);
  return rows;
}

}  // namespace mgpu::splat
