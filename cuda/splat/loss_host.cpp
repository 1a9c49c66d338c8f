// SPDX-License-Identifier: Apache-2.0
// loss_host.cpp: one pass over the rows of a band. Rows are arrays of 3 * width floats, so a window is eleven
// taps at distance 3 in a row, and eleven rows; both are the same vector loop. What is alive at a time is
// eleven rows of each map.
#pragma GCC optimize("no-trapping-math", "no-math-errno")  // else loops with selects and roots stay scalar
#include "splat/loss.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "math/ssim.h"
#include "memory/buffer.h"
#include "mesh/fork_join.h"
#include "splat/transport.h"

namespace mgpu::splat {

namespace {

using math::kSsimRadius;
using math::kSsimShift;
using math::kSsimWindow;

constexpr int64_t kChannels = 3;
constexpr int64_t kHalo = 2 * kSsimRadius;  // rows needed of a neighbour: windows of the windows of my pixels
constexpr int64_t kPad = kChannels * kSsimRadius;
constexpr int64_t kSmallestBand = 32;  // rows of a thread's piece; each recomputes the SSIM of 10 rows

// Sum in double with eight running sums: a fixed order that vectorises.
inline double ordered_sum(const float* values, int64_t count) {
  double partial[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane) partial[lane] += values[i + lane];
  }
  for (; i < count; ++i) partial[i & 7] += values[i];
  return ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
         ((partial[4] + partial[5]) + (partial[6] + partial[7]));
}

// The rows that a shard sees: its band and the halo. A mesh of one shard reads them in place; otherwise they
// are pulled into the shard's own memory, because rows of an image need not lie where its bands are (it may
// be a part of a larger tensor).
class BandRows {
 public:
  BandRows(const LossImages& images, RowRange own, int shard, int shards, bool wants_gradient)
      : images_(images),
        own_(own),
        held_{0, images.height},
        row_length_(images.width * kChannels),
        pulls_(shards > 1) {
    if (!pulls_) return;
    held_ = {std::max<int64_t>(0, own.begin - kHalo), std::min(images.height, own.end + kHalo)};
    if (own.empty()) held_ = {own.begin, own.begin};
    const int64_t rows = held_.size();
    rgb_ = Buffer<float>(rows * row_length_, shard);
    if (images.target) target_ = Buffer<float>(rows * row_length_, shard);
    if (images.target_bytes) target_bytes_ = Buffer<uint8_t>(rows * row_length_, shard);
    if (images.mask) mask_ = Buffer<uint8_t>(rows * images.width, shard);
    if (wants_gradient) gradient_ = Buffer<float>(own.size() * row_length_, shard);
  }

  // In a declared exchange: fetch the rows held.
  void pull() {
    if (!pulls_) return;
    copy_rows(rgb_, images_.rgb, row_length_);
    copy_rows(target_, images_.target, row_length_);
    copy_rows(target_bytes_, images_.target_bytes, row_length_);
    copy_rows(mask_, images_.mask, images_.width);
  }
  // In a declared exchange: put the band's gradient into the image of gradients.
  void push(float* dL_drgb) const {
    if (gradient_.size() > 0)
      std::copy(gradient_.begin(), gradient_.end(), dL_drgb + own_.begin * row_length_);
  }

  const float* rgb(int64_t row) const { return find(rgb_, images_.rgb, row, row_length_); }
  const float* target(int64_t row) const { return find(target_, images_.target, row, row_length_); }
  const uint8_t* target_bytes(int64_t row) const {
    return find(target_bytes_, images_.target_bytes, row, row_length_);
  }
  const uint8_t* mask(int64_t row) const { return find(mask_, images_.mask, row, images_.width); }
  double sum(int64_t, const float* values, RowRange part) const {
    return ordered_sum(values + part.begin, part.size());
  }
  // Where the gradient of a row of the band goes.
  float* gradient(float* dL_drgb, int64_t row) {
    return pulls_ ? gradient_.data() + (row - own_.begin) * row_length_ : dL_drgb + row * row_length_;
  }

 private:
  template <typename T>
  void copy_rows(Buffer<T>& to, const T* from, int64_t length) const {
    if (from) std::copy(from + held_.begin * length, from + held_.end * length, to.data());
  }
  template <typename T>
  const T* find(const Buffer<T>& held, const T* whole, int64_t row, int64_t length) const {
    return pulls_ ? held.data() + (row - held_.begin) * length : whole + row * length;
  }

  LossImages images_;
  RowRange own_, held_;
  int64_t row_length_;
  bool pulls_;
  Buffer<float> rgb_, target_, gradient_;
  Buffer<uint8_t> target_bytes_, mask_;
};

// Per-row sums of the whole image, later added up in order of rows.
struct RowSums {
  std::vector<double> l1, ssim;
  std::vector<int64_t> pixels, centres;  // that count
};

// out[i] = sum over k of weight[k] * tap[k][i]. Eleven rows make a vertical window, eleven shifts a
// horizontal one.
inline void window_sum(const std::array<const float*, kSsimWindow>& tap, int64_t count, float* out) {
  const float w0 = math::kSsimWeight[0], w1 = math::kSsimWeight[1], w2 = math::kSsimWeight[2];
  const float w3 = math::kSsimWeight[3], w4 = math::kSsimWeight[4], w5 = math::kSsimWeight[5];
  const float *a = tap[0], *b = tap[1], *c = tap[2], *d = tap[3], *e = tap[4], *f = tap[5];
  const float *g = tap[6], *h = tap[7], *p = tap[8], *q = tap[9], *r = tap[10];
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    out[i] = w5 * f[i] + w4 * (e[i] + g[i]) + w3 * (d[i] + h[i]) + w2 * (c[i] + p[i]) + w1 * (b[i] + q[i]) +
             w0 * (a[i] + r[i]);
  }
}

// Horizontal window around in[i], i = 0..count-1; reads in[-kPad .. count + kPad - 1].
inline void window_sum_along(const float* in, int64_t count, float* out) {
  std::array<const float*, kSsimWindow> tap;
  for (int k = 0; k < kSsimWindow; ++k) tap[static_cast<size_t>(k)] = in + kChannels * (k - kSsimRadius);
  window_sum(tap, count, out);
}

// Eleven rows of a map, by row number modulo eleven.
class RowRing {
 public:
  RowRing() = default;
  RowRing(float* data, int64_t stride) : data_(data), stride_(stride) {}
  float* row(int64_t number) const { return data_ + (number % kSsimWindow) * stride_; }
  // The rows of the window around `centre`; rows outside `rows` are `blank`.
  std::array<const float*, kSsimWindow> around(int64_t centre, RowRange rows, const float* blank) const {
    std::array<const float*, kSsimWindow> tap;
    for (int k = 0; k < kSsimWindow; ++k) {
      const int64_t number = centre + k - kSsimRadius;
      tap[static_cast<size_t>(k)] = number >= rows.begin && number < rows.end ? row(number) : blank;
    }
    return tap;
  }

 private:
  float* data_ = nullptr;
  int64_t stride_ = 0;
};

struct Scales {
  float l1;    // (1 - ssim_weight) / (pixels * channels)
  float ssim;  // -ssim_weight / (centres * channels); 0: no SSIM
};

// Rows: where the rows of the image are, and what of them is summed.
template <bool kMasked, typename Rows>
class BandPass {
 public:
  BandPass(const LossImages& images, Rows& rows, const Scales& scales, float* dL_drgb, RowSums& sums,
           int shard)
      : images_(images),
        rows_(rows),
        scales_(scales),
        dL_drgb_(dL_drgb),
        sums_(sums),
        length_(images.width * kChannels),
        stride_((length_ + 2 * kPad + 31) / 16 * 16),
        memory_((kRings * kSsimWindow + kLines) * stride_, shard) {
    std::fill(memory_.begin(), memory_.end(), 0.0f);
    float* next = memory_.data();
    for (RowRing* ring : {&x_, &y_, &squares_, &product_, &weight_, &by_mean_, &by_square_, &by_product_}) {
      *ring = RowRing(next, stride_);
      next += kSsimWindow * stride_;
    }
    for (float** line :
         {&blank_, &column_, &mean_x_, &mean_y_, &mean_squares_, &mean_product_, &mean_weight_, &value_,
          &d_mean_, &d_square_, &d_product_, &sum_mean_, &sum_square_, &sum_product_, &target_, &keep_}) {
      *line = next;
      next += stride_;
    }
    d_mean_ += kPad;  // zeros on both sides stand for centres outside the image
    d_square_ += kPad;
    d_product_ += kPad;
  }

  // Gradient of the pixel rows `own`, sums of the pixels and centres in them.
  void run(RowRange own) {
    const bool with_ssim = scales_.ssim != 0.0f;
    const RowRange valid{kSsimRadius, images_.height - kSsimRadius};
    const RowRange centres{std::max(valid.begin, own.begin - kSsimRadius),
                           std::min(valid.end, own.end + kSsimRadius)};
    int64_t loaded = centres.begin - kSsimRadius;
    int64_t done = centres.begin;
    for (int64_t row = own.begin; row < own.end; ++row) {
      if (with_ssim) {
        for (const int64_t last = std::min(centres.end, row + kSsimRadius + 1); done < last; ++done) {
          for (; loaded <= done + kSsimRadius; ++loaded) load(loaded);
          centre_row(done, done >= own.begin && done < own.end);
        }
      }
      pixel_row(row, with_ssim, centres);
    }
  }

 private:
  static constexpr int64_t kRings = 8, kLines = 16;

  void read_target(int64_t row, float* out) const {
    if (images_.target_bytes) {
      const uint8_t* bytes = rows_.target_bytes(row);
      for (int64_t i = 0; i < length_; ++i) out[i] = static_cast<float>(bytes[i]) / 255.0f;
    } else {
      std::memcpy(out, rows_.target(row), static_cast<size_t>(length_) * sizeof(float));
    }
  }

  void read_keep(int64_t row, float* out) const {
    const uint8_t* mask = rows_.mask(row);
    for (int64_t pixel = 0; pixel < images_.width; ++pixel) {
      const float keep = mask[pixel] ? 1.0f : 0.0f;
      for (int64_t channel = 0; channel < kChannels; ++channel) out[pixel * kChannels + channel] = keep;
    }
  }

  // The shifted values of one row and their products; a masked pixel is zero even where it holds a NaN.
  void load(int64_t row) {
    const float* rgb = rows_.rgb(row);
    float *x = x_.row(row), *y = y_.row(row), *squares = squares_.row(row), *product = product_.row(row);
    read_target(row, y);
    if constexpr (kMasked) {
      float* weight = weight_.row(row);
      read_keep(row, weight);
#pragma GCC ivdep
      for (int64_t i = 0; i < length_; ++i) {
        x[i] = weight[i] != 0.0f ? rgb[i] - kSsimShift : 0.0f;
        y[i] = weight[i] != 0.0f ? y[i] - kSsimShift : 0.0f;
      }
    } else {
#pragma GCC ivdep
      for (int64_t i = 0; i < length_; ++i) {
        x[i] = rgb[i] - kSsimShift;
        y[i] -= kSsimShift;
      }
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < length_; ++i) {
      squares[i] = x[i] * x[i] + y[i] * y[i];
      product[i] = x[i] * y[i];
    }
  }

  // SSIM and its derivatives at the centres of one row, the latter spread along the row.
  void centre_row(int64_t row, bool count) {
    const int64_t inner = length_ - 2 * kPad;
    const RowRange all{0, images_.height};
    auto window_mean = [&](const RowRing& ring, float* mean) {
      window_sum(ring.around(row, all, blank_), length_, column_);
      window_sum_along(column_ + kPad, inner, mean + kPad);
    };
    window_mean(x_, mean_x_);
    window_mean(y_, mean_y_);
    window_mean(squares_, mean_squares_);
    window_mean(product_, mean_product_);
    const float* keep = nullptr;
    if constexpr (kMasked) {
      window_mean(weight_, mean_weight_);
      keep = weight_.row(row);
    }
#pragma GCC ivdep
    for (int64_t i = kPad; i < kPad + inner; ++i) {
      math::SsimDerivative derivative;
      if constexpr (kMasked) {
        const float scale = keep[i] / (mean_weight_[i] + 1.0f - keep[i]);  // 0 where masked
        const float value = math::ssim(mean_x_[i] * scale, mean_y_[i] * scale, mean_squares_[i] * scale,
                                       mean_product_[i] * scale, derivative);
        value_[i] = keep[i] * value;
        d_mean_[i] = derivative.by_mean * scale;
        d_square_[i] = derivative.by_square * scale;
        d_product_[i] = derivative.by_product * scale;
      } else {
        value_[i] = math::ssim(mean_x_[i], mean_y_[i], mean_squares_[i], mean_product_[i], derivative);
        d_mean_[i] = derivative.by_mean;
        d_square_[i] = derivative.by_square;
        d_product_[i] = derivative.by_product;
      }
    }
    if (count) sums_.ssim[static_cast<size_t>(row)] = rows_.sum(row, value_, {kPad, kPad + inner});
    if (!dL_drgb_) return;
    window_sum_along(d_mean_, length_, by_mean_.row(row));
    window_sum_along(d_square_, length_, by_square_.row(row));
    window_sum_along(d_product_, length_, by_product_.row(row));
  }

  // L1 and the gradient of one row of pixels, from the centres of eleven rows.
  void pixel_row(int64_t row, bool with_ssim, RowRange centres) {
    const float* rgb = rows_.rgb(row);
    read_target(row, target_);
    if constexpr (kMasked) read_keep(row, keep_);
#pragma GCC ivdep
    for (int64_t i = 0; i < length_; ++i) {
      const float difference = rgb[i] - target_[i];
      value_[i] = !kMasked || keep_[i] != 0.0f ? std::fabs(difference) : 0.0f;
    }
    sums_.l1[static_cast<size_t>(row)] = rows_.sum(row, value_, {0, length_});
    if (!dL_drgb_) return;
    float* out = rows_.gradient(dL_drgb_, row);
    const float l1 = scales_.l1;
    if (!with_ssim) {
#pragma GCC ivdep
      for (int64_t i = 0; i < length_; ++i) {
        const float sign = static_cast<float>(rgb[i] > target_[i]) - static_cast<float>(rgb[i] < target_[i]);
        out[i] = !kMasked || keep_[i] != 0.0f ? l1 * sign : 0.0f;
      }
      return;
    }
    window_sum(by_mean_.around(row, centres, blank_), length_, sum_mean_);
    window_sum(by_square_.around(row, centres, blank_), length_, sum_square_);
    window_sum(by_product_.around(row, centres, blank_), length_, sum_product_);
    const float scale = scales_.ssim;
#pragma GCC ivdep
    for (int64_t i = 0; i < length_; ++i) {
      const float sign = static_cast<float>(rgb[i] > target_[i]) - static_cast<float>(rgb[i] < target_[i]);
      const float x = rgb[i] - kSsimShift, y = target_[i] - kSsimShift;
      const float gradient =
          l1 * sign + scale * (sum_mean_[i] + 2.0f * x * sum_square_[i] + y * sum_product_[i]);
      out[i] = !kMasked || keep_[i] != 0.0f ? gradient : 0.0f;
    }
  }

  const LossImages& images_;
  Rows& rows_;
  const Scales scales_;
  float* dL_drgb_;
  RowSums& sums_;
  int64_t length_, stride_;
  Buffer<float> memory_;
  RowRing x_, y_, squares_, product_, weight_, by_mean_, by_square_, by_product_;
  float *blank_, *column_, *mean_x_, *mean_y_, *mean_squares_, *mean_product_, *mean_weight_, *value_;
  float *d_mean_, *d_square_, *d_product_, *sum_mean_, *sum_square_, *sum_product_, *target_, *keep_;
};

// How many pixels and SSIM centres of a row count.
void count_row(const LossImages& images, const BandRows& rows, bool any_centre, int64_t row, RowSums& sums) {
  const int64_t width = images.width;
  const bool centre_row = any_centre && row >= kSsimRadius && row < images.height - kSsimRadius;
  int64_t pixels = width, centres = centre_row ? width - 2 * kSsimRadius : 0;
  if (images.mask) {
    const uint8_t* mask = rows.mask(row);
    pixels = centres = 0;
    for (int64_t pixel = 0; pixel < width; ++pixel) {
      const bool kept = mask[pixel] != 0;
      pixels += kept;
      centres += kept && centre_row && pixel >= kSsimRadius && pixel < width - kSsimRadius;
    }
  }
  sums.pixels[static_cast<size_t>(row)] = pixels;
  sums.centres[static_cast<size_t>(row)] = centres;
}

template <typename T>
T in_order(const std::vector<T>& rows) {
  T sum{};
  for (const T value : rows) sum += value;
  return sum;
}

Scales scales_of(int64_t pixels, int64_t centres, float ssim_weight, float share) {
  const double l1_share = centres > 0 ? 1.0 - static_cast<double>(ssim_weight) : 1.0;
  return {pixels > 0 ? share * static_cast<float>(l1_share / static_cast<double>(pixels)) : 0.0f,
          centres > 0
              ? share * static_cast<float>(-static_cast<double>(ssim_weight) / static_cast<double>(centres))
              : 0.0f};
}

LossValue value_of(double l1, double ssim, int64_t pixels, int64_t centres, float ssim_weight) {
  LossValue value;
  if (pixels > 0) value.l1 = l1 / static_cast<double>(pixels);
  if (centres > 0) value.ssim = ssim / static_cast<double>(centres);
  value.loss = (centres > 0 ? 1.0 - static_cast<double>(ssim_weight) : 1.0) * value.l1;
  if (centres > 0) value.loss += static_cast<double>(ssim_weight) * (1.0 - value.ssim);
  return value;
}

// ---- a shard's patch of an image

// A window into the image that is an image of its own: the patch's rectangle and what its windows reach. Its
// pixels are right where the shard holds them, and nothing else is summed or put out that anybody reads.
class PatchRows {
 public:
  PatchRows(const PatchedImage& image, int shard)
      : image_(image.images),
        patch_(image.patches[static_cast<size_t>(shard)]),
        tiles_x_((image_.width + kTileSize - 1) / kTileSize) {
    if (patch_.patch.empty()) return;
    const ViewPatch& patch = patch_.patch;
    own_ = {int64_t{patch.y0} * kTileSize, std::min(image_.height, int64_t{patch.y1} * kTileSize)};
    window_ = image_;
    first_row_ = std::max<int64_t>(0, own_.begin - kHalo);
    window_.height = std::min(image_.height, own_.end + kHalo) - first_row_;
    first_column_ = std::max<int64_t>(0, int64_t{patch.x0} * kTileSize - kHalo);
    window_.width = std::min(image_.width, int64_t{patch.x1} * kTileSize + kHalo) - first_column_;
    const int64_t pixels = window_.height * window_.width;
    if (image_.target) target_ = Buffer<float>(pixels * kChannels, shard);
    if (image_.target_bytes) target_bytes_ = Buffer<uint8_t>(pixels * kChannels, shard);
    if (image_.mask) mask_ = Buffer<uint8_t>(pixels, shard);
    const auto height = static_cast<size_t>(window_.height);
    sums.l1.assign(height, 0.0);
    sums.ssim = sums.l1;
    gradient_ = Buffer<float>(own_.size() * window_.width * kChannels, shard);
  }
  bool empty() const { return patch_.patch.empty(); }
  // In a declared exchange: fetch the photograph.
  void pull() {
    if (empty()) return;
    copy_window(target_, image_.target, kChannels);
    copy_window(target_bytes_, image_.target_bytes, kChannels);
    copy_window(mask_, image_.mask, 1);
  }

  const LossImages& window() const { return window_; }
  RowRange own() const { return {own_.begin - first_row_, own_.end - first_row_}; }  // rows of the window
  const float* rgb(int64_t row) const {
    return patch_.rgb + ((first_row_ + row) * image_.width + first_column_) * kChannels;
  }
  const float* target(int64_t row) const { return target_.data() + row * window_.width * kChannels; }
  const uint8_t* target_bytes(int64_t row) const {
    return target_bytes_.data() + row * window_.width * kChannels;
  }
  const uint8_t* mask(int64_t row) const { return mask_.data() + row * window_.width; }
  float* gradient(float*, int64_t row) {
    return gradient_.data() + (first_row_ + row - own_.begin) * window_.width * kChannels;
  }

  // Calls visit(columns of the image) for each run of the shard's own tiles in a row of the window.
  template <typename Visit>
  void for_each_run(int64_t row, const Visit& visit) const {
    const int64_t tile_row = (first_row_ + row) / kTileSize * tiles_x_;
    for (int64_t x = patch_.patch.x0; x < patch_.patch.x1; ++x) {
      if (!owns(tile_row + x)) continue;
      const int64_t begin = x;
      while (x < patch_.patch.x1 && owns(tile_row + x)) ++x;
      visit(RowRange{begin * kTileSize, std::min(image_.width, x * kTileSize)});
    }
  }
  // Of a row of values of the window, those of the shard's own pixels within `part`.
  double sum(int64_t row, const float* values, RowRange part) const {
    double sum = 0.0;
    for_each_run(row, [&](RowRange columns) {
      const int64_t begin = std::max(part.begin, (columns.begin - first_column_) * kChannels);
      const int64_t end = std::min(part.end, (columns.end - first_column_) * kChannels);
      if (begin < end) sum += ordered_sum(values + begin, end - begin);
    });
    return sum;
  }
  // Own pixels and SSIM centres that count.
  void count(bool any_centre, uint64_t& pixels, uint64_t& centres) const {
    for (int64_t row = own().begin; row < own().end; ++row) {
      const int64_t y = first_row_ + row;
      const bool centre_row = any_centre && y >= kSsimRadius && y < image_.height - kSsimRadius;
      for_each_run(row, [&](RowRange columns) {
        for (int64_t x = columns.begin; x < columns.end; ++x) {
          if (image_.mask && !mask(row)[x - first_column_]) continue;
          ++pixels;
          centres += centre_row && x >= kSsimRadius && x < image_.width - kSsimRadius;
        }
      });
    }
  }
  // The gradient of the shard's own pixels to where it belongs.
  void put_gradient() {
    for (int64_t row = own().begin; row < own().end; ++row) {
      for_each_run(row, [&](RowRange columns) {
        const float* from = gradient(nullptr, row) + (columns.begin - first_column_) * kChannels;
        std::copy_n(from, columns.size() * kChannels,
                    patch_.dL_drgb + ((first_row_ + row) * image_.width + columns.begin) * kChannels);
      });
    }
  }

  RowSums sums;  // by row of the window; without counts

 private:
  bool owns(int64_t tile) const {
    const int64_t position = patch_.position_from_tile ? patch_.position_from_tile[tile] : tile;
    return position >= patch_.tiles.begin && position < patch_.tiles.end;
  }
  template <typename T>
  void copy_window(Buffer<T>& to, const T* from, int64_t channels) const {
    if (!from) return;
    for (int64_t row = 0; row < window_.height; ++row) {
      std::copy_n(from + ((first_row_ + row) * image_.width + first_column_) * channels,
                  window_.width * channels, to.data() + row * window_.width * channels);
    }
  }

  const LossImages& image_;
  const LossPatch& patch_;
  int64_t tiles_x_;
  RowRange own_{};  // rows of the image
  int64_t first_row_ = 0, first_column_ = 0;
  LossImages window_{};
  Buffer<float> target_, gradient_;
  Buffer<uint8_t> target_bytes_, mask_;
};

template <typename Rows>
void run_bands(const LossImages& images, Rows& rows, const Scales& scales, float* dL_drgb, RowSums& sums,
               RowRange band, int shard) {
  const int64_t grain = std::max(kSmallestBand, (band.size() + num_threads() - 1) / num_threads());
  parallel_for(band.size(), grain, [&](int64_t begin, int64_t end) {
    const RowRange own{band.begin + begin, band.begin + end};
    if (images.mask)
      BandPass<true, Rows>(images, rows, scales, dL_drgb, sums, shard).run(own);
    else
      BandPass<false, Rows>(images, rows, scales, dL_drgb, sums, shard).run(own);
  });
}

}  // namespace

RowRange loss_band(const LossImages& images, int shard, int shards) {
  return equal_chunk(images.height, shard, shards);
}

LossReach loss_reach(int64_t height, int64_t width, float ssim_weight) {
  if (height < kSsimWindow || width < kSsimWindow || ssim_weight == 0.0f) return {};
  constexpr int reach = static_cast<int>(kHalo);
  return {reach, reach, reach};
}

LossValue l1_ssim(const LossImages& images, float ssim_weight, float* dL_drgb, float share) {
  const int shards = mesh().size();
  const bool any_centre = images.height >= kSsimWindow && images.width >= kSsimWindow && ssim_weight != 0.0f;
  RowSums sums;
  sums.l1.assign(static_cast<size_t>(images.height), 0.0);
  sums.ssim = sums.l1;
  sums.pixels.assign(static_cast<size_t>(images.height), 0);
  sums.centres = sums.pixels;
  if (images.height == 0 || images.width == 0) return {};

  std::vector<BandRows> bands;
  for (const Shard& shard : mesh().shards()) {
    const RowRange band = loss_band(images, shard.index, shards);
    bands.emplace_back(images, band, shard.index, shards, dL_drgb != nullptr);
  }
  auto rows_of = [&](const Shard& shard) -> BandRows& { return bands[static_cast<size_t>(shard.index)]; };
  for_each_shard("loss exchange", [&](const Shard& shard) { rows_of(shard).pull(); }, Access::kExchange);
  for_each_shard("loss count", [&](const Shard& shard) {
    const RowRange band = loss_band(images, shard.index, shards);
    for (int64_t row = band.begin; row < band.end; ++row)
      count_row(images, rows_of(shard), any_centre, row, sums);
  });

  const int64_t pixels = in_order(sums.pixels) * kChannels, centres = in_order(sums.centres) * kChannels;
  const Scales scales = scales_of(pixels, centres, ssim_weight, share);
  for_each_shard("loss", [&](const Shard& shard) {
    const RowRange band = loss_band(images, shard.index, shards);
    run_bands(images, rows_of(shard), scales, dL_drgb, sums, band, shard.index);
  });

  if (dL_drgb && shards > 1) {
    for_each_shard(
        "loss gradient exchange", [&](const Shard& shard) { rows_of(shard).push(dL_drgb); },
        Access::kExchange);
  }

  return value_of(in_order(sums.l1), in_order(sums.ssim), pixels, centres, ssim_weight);
}

void l1_ssim_into(const LossImages& images, float ssim_weight, float* dL_drgb, float* value, float share) {
  const LossValue all = l1_ssim(images, ssim_weight, dL_drgb, share);
  value[0] = static_cast<float>(all.loss);
  value[1] = static_cast<float>(all.l1);
  value[2] = static_cast<float>(all.ssim);
}

void patch_losses_into(const std::vector<PatchedImage>& images, float ssim_weight, float* values,
                       float share) {
  const auto shards = static_cast<size_t>(mesh().size());
  std::vector<std::vector<PatchRows>> rows(shards);
  for (size_t shard = 0; shard < shards; ++shard) {
    for (const PatchedImage& image : images) rows[shard].emplace_back(image, static_cast<int>(shard));
  }
  const auto rows_of = [&](const Shard& shard) -> std::vector<PatchRows>& {
    return rows[static_cast<size_t>(shard.index)];
  };
  const auto pull = [&](const Shard& shard) {
    for (PatchRows& patch : rows_of(shard)) patch.pull();
  };
  for_each_shard("loss exchange", pull, Access::kExchange);

  // Tables of two words for each shard and image: what each has, and then of all.
  const size_t words = 2 * images.size();
  const auto total = [&](const std::vector<uint64_t>& table, size_t word, auto as) {
    decltype(as) sum{};
    for (size_t shard = 0; shard < shards; ++shard)
      sum += std::bit_cast<decltype(as)>(table[shard * words + word]);
    return sum;
  };
  std::vector<uint64_t> counted(shards * words, 0), summed(shards * words, 0);
  for_each_shard("loss count", [&](const Shard& shard) {
    uint64_t* const mine = counted.data() + static_cast<size_t>(shard.index) * words;
    for (size_t v = 0; v < images.size(); ++v) {
      const LossImages& image = images[v].images;
      const bool any_centre = loss_reach(image.height, image.width, ssim_weight).side > 0;
      rows_of(shard)[v].count(any_centre, mine[2 * v], mine[2 * v + 1]);
    }
  });
  transport().gather(counted.data(), static_cast<int64_t>(words));
  const auto pixels = [&](size_t v) { return kChannels * total(counted, 2 * v, int64_t{}); };
  const auto centres = [&](size_t v) { return kChannels * total(counted, 2 * v + 1, int64_t{}); };

  for_each_shard("loss", [&](const Shard& shard) {
    uint64_t* const mine = summed.data() + static_cast<size_t>(shard.index) * words;
    for (size_t v = 0; v < images.size(); ++v) {
      PatchRows& patch = rows_of(shard)[v];
      if (patch.empty()) continue;
      const Scales scales = scales_of(pixels(v), centres(v), ssim_weight, share);
      float* const wanted = images[v].patches[static_cast<size_t>(shard.index)].dL_drgb;
      run_bands(patch.window(), patch, scales, wanted, patch.sums, patch.own(), shard.index);
      patch.put_gradient();
      mine[2 * v] = std::bit_cast<uint64_t>(in_order(patch.sums.l1));
      mine[2 * v + 1] = std::bit_cast<uint64_t>(in_order(patch.sums.ssim));
    }
  });
  transport().gather(summed.data(), static_cast<int64_t>(words));
  for (size_t v = 0; v < images.size(); ++v) {
    const LossValue value = value_of(total(summed, 2 * v, double{}), total(summed, 2 * v + 1, double{}),
                                     pixels(v), centres(v), ssim_weight);
    const double all[3] = {value.loss, value.l1, value.ssim};
    std::transform(all, all + 3, values + 3 * v, [](double x) { return static_cast<float>(x); });
  }
}

}  // namespace mgpu::splat
