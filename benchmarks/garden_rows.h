// SPDX-License-Identifier: Apache-2.0
// garden_rows.h: what blend_stage.cpp and project_stage.cu share: the files that write_garden of
// blend_variants.py makes, and random numbers of a row.
#pragma once
#include <cmath>
#include <cstdint>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "math/host_device.h"

// A file of numbers, whole.
template <typename T>
std::vector<T> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file)
    throw std::runtime_error("cannot read " + path + "; run the stage's *_variants.py, which makes it");
  std::vector<T> values(static_cast<size_t>(file.tellg()) / sizeof(T));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
  return values;
}

// Numbers of one row: the same on any number of threads.
struct RowRandom {
  uint64_t state;
  HOST_DEVICE float unit() {  // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (static_cast<float>((z ^ (z >> 31)) >> 40) + 0.5f) * 0x1p-24f;
  }
  HOST_DEVICE float normal() { return std::sqrt(-2.f * std::log(unit())) * std::cos(6.2831853f * unit()); }
};
