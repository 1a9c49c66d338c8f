// SPDX-License-Identifier: Apache-2.0
// frame.h: everything a forward pass leaves behind, laid out in one place. Owner of each array in its
// comment.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "math/view.h"
#include "memory/buffer.h"
#include "mesh/mesh.h"
#include "splat/columns.h"
#include "splat/curve.h"
#include "splat/links.h"
#include "splat/patches.h"
#include "splat/ranges.h"

namespace mgpu::splat {

class Cells;

struct RenderSettings {
  bool antialiased = false;
  int sh_degree = 3;
  bool wanted_depth = true;
  bool wanted_absgrad = true;  // RecordGrad::abs_mean2d; the host always has it
  float background[3] = {0.f, 0.f, 0.f};
  bool deterministic =
      false;  // CUDA: sum record gradients in list order instead of by atomics; the host always does
  bool wanted_backward = true;  // CUDA: keep what the way back needs

  int sh_count() const { return (sh_degree + 1) * (sh_degree + 1); }
};

// The images of one view, row-major float32; depth is the accumulated one (weight times depth), null if not
// wanted.
struct ImagePointers {
  float* rgb;           // [H, W, 3], over the background
  float* depth;         // [H, W]
  float* accumulation;  // [H, W]
};

// What is left of a visible Gaussian after projection.
struct Record {
  float mean2d[2];  // pixels
  float conic[3];   // inverse of the dilated 2D covariance: xx, xy, yy
  float opacity;    // after antialiasing's compensation
  float rgb[3];
  float depth;            // z in the camera; of a fisheye the distance to it
  uint16_t tile_rect[4];  // x0, y0, x1, y1 (exclusive), in tiles
};
static_assert(sizeof(Record) == 48);

// dL/d(record), and the sum over pixels of |dL/dmean2d| (absgrad).
struct RecordGrad {
  float mean2d[2];
  float conic[3];
  float opacity;
  float rgb[3];
  float depth;
  float abs_mean2d[2];
};
static_assert(sizeof(RecordGrad) == 48);

HOST_DEVICE inline void add_to(RecordGrad& sum, const RecordGrad& part) {
  for (int i = 0; i < 2; ++i) sum.mean2d[i] += part.mean2d[i];
  for (int i = 0; i < 3; ++i) sum.conic[i] += part.conic[i];
  sum.opacity += part.opacity;
  for (int i = 0; i < 3; ++i) sum.rgb[i] += part.rgb[i];
  sum.depth += part.depth;
  for (int i = 0; i < 2; ++i) sum.abs_mean2d[i] += part.abs_mean2d[i];
}

// The tiles of one record, all or those of one owner. CUDA flavour, from where the record is measured until
// bin.
struct TileCover {
  uint16_t tile_rect[4];  // as in Record
  uint32_t mask;          // if the rectangle has at most kSmallTiles tiles: those that are met, row by row
  int32_t count;          // how many are met
};
static_assert(sizeof(TileCover) == 16);
constexpr int kSmallTiles = 32;

// What one shard's rows cost before there are records. Without cells both counts of cells are 0.
struct CullCounts {
  int64_t cells = 0, cells_kept = 0;  // all, and those that some view may see
  int64_t candidates = 0;             // pairs of a row and a view that were projected
};

// A bit a range.
#if MGPU_CUDA
using RangeMask = uint32_t;
#else
using RangeMask = uint64_t;
#endif

// Records of one shard's rows, at home, ordered by (view, row).
struct ShardRecords {
  Buffer<int64_t> row;      // home
  Buffer<int32_t> view;     // home
  Buffer<Record> record;    // home
  Buffer<RecordGrad> grad;  // home; filled by the return stage, empty before
  int64_t count = 0;
  int64_t remote = 0;               // how many of them another shard blends, alone or too
  std::vector<int64_t> view_begin;  // [views + 1], into the arrays above
  // home; several shards: bit r is set if range r has a tile of the record. Host: until it is packed; CUDA:
  // says which records a parcel has, there and back
  Buffer<RangeMask> range_mask;
  Buffer<int32_t> patches;  // home; CUDA, several shards: as in TileOwner, until stage "assign" is done
  Buffer<uint32_t> large;   // home; the same: the large_count records without a mask of tiles, in any order
  int64_t large_count = 0;
  Buffer<TileCover> cover;     // home; the same: all tiles of the record
  Buffer<uint32_t> tile_mask;  // home; CUDA, several shards, from stage "assign" until packed: their `mask`
  Buffer<unsigned long long> parcel_words;  // home; CUDA, several shards: ParcelWords (assign_kernels.h)
  CullCounts culled;
};

// One home's parcel for one owner: the records that touch the owner's tiles, still ordered by (view, row).
struct Parcel {
  Buffer<Record> record;               // home; until it is delivered, if it must travel
  Buffer<RecordGrad> grad;             // home; on the way back, the same
  Buffer<int64_t> record_from_parcel;  // home; host flavour
  std::vector<int64_t> view_begin;     // [views + 1]
  int64_t count = 0;
};

// One entry of a tile's list. Gradient slot of the pair: slot_begin[record] + ordinal.
struct TileEntry {
  int32_t record;   // among the records this owner received
  int32_t ordinal;  // which of the record's tiles (within the owner's range) this is
};

// Up to 32 records that light pixels of one patch (8x4 pixels of a tile), neighbours in its list: the unit of
// CUDA's way back.
struct alignas(16) PatchBucket {
  int32_t patch;           // tile in the owner's range * 8 + patch of the tile
  int32_t view_and_count;  // view * 64 + records
  int32_t x, y;            // the patch's first pixel
};

// One shard as owner of a range of tiles. On a CUDA mesh of one shard `record` and `view` are empty: they are
// the home's. CUDA: of a single view `view` is empty on any mesh.
struct TileOwner {
  RowRange tiles;                   // positions in the order of the tiles of all views
  std::vector<int64_t> peer_begin;  // [shards + 1]: received records by home, in row order
  Buffer<Record> record;            // owner; received
  Buffer<int32_t> view;             // owner
  // owner; CUDA, several shards, until stage "bin" is done: which tiles of the record's rectangle are met and
  // the owner's, as in TileCover. 0: not known
  Buffer<uint32_t> tile_mask;
  Buffer<float> half_extent;    // owner; [records, 2] pixels, where alpha can reach 1/255
  Buffer<int64_t> slot_begin;   // owner; [records + 1]
  Buffer<TileEntry> entry;      // owner; tile by tile, front to back; host flavour
  Buffer<int64_t> tile_begin;   // owner; [tiles + 1], into entry
  Buffer<float> transmittance;  // owner; [tiles, 256] after the last contribution
  Buffer<int32_t>
      contributors;      // owner; [tiles, 256] 1 + position in the tile's list of the last contribution
  Buffer<float> pixels;  // owner; [tiles, 4, 256] rgb and depth, planar; freed once images are assembled
  Buffer<RecordGrad> slot_grad;    // owner; [intersections], during backward only; host flavour
  Buffer<RecordGrad> record_grad;  // owner; [received], during backward only
  int64_t pairs = 0;               // length of entry: pairs of (tile, record)

  // CUDA flavour
  // An upper bound of the pairs (patch of 8x4 pixels, record) that the blend stage's box cull can meet: for
  // each entry of a tile's list, the patches of that tile (2 across, 4 down, from the tile's first pixel)
  // with
  //   |mean2d - middle of the patch| <= half_extent * 1.000002 + (half the distance of its outer centres) +
  //   0.03 px
  // on both axes. What math::patches_met keeps (math/patch.h) is inside it, so it is counted here. Tiles that
  // the ellipse test rejected are not counted. Set by stage "project", in its read-back.
  int64_t patch_pairs = 0;
  // What bin sorts by and lists, and frees; on a mesh of one shard stage "project" fills it.
  Buffer<TileCover> cover;                     // owner; [records]
  Buffer<uint32_t> depth_key;                  // owner; [records], bits of depth less those of the near plane
  Buffer<unsigned long long> depth_histogram;  // owner; [kDepthBins], of the key's lowest digit
  uint32_t largest_depth_key = 0;              // or more
  Buffer<int32_t> entry_record;                // owner; the records of `entry`, which stays empty
  Buffer<PatchBucket> bucket;                  // owner; the first bucket_count[0] are in use, in any order
  Buffer<int32_t> bucket_count;                // owner; [1], and counters of stage "blend"
  Buffer<int32_t> bucket_record;               // owner; [buckets, 32] front to back
  Buffer<float> bucket_state;  // owner; [buckets, 32, 4]: T (-1: ended), red, green, blue before the bucket
  Buffer<float> bucket_depth;  // owner; [buckets, 32], if depth is wanted

  int64_t received() const { return peer_begin.empty() ? 0 : peer_begin.back(); }
};

// CUDA flavour, several shards: a TileCurve in memory of a shard.
struct DeviceCurve {
  Buffer<int32_t> position_from_tile, tile_from_position;
};

// CUDA flavour: what a shard's kernels read of the frame besides the table.
struct ShardConstants {
  Buffer<float> memory;                                    // shard; what the others point into
  const View* views = nullptr;                             // [views]
  std::vector<std::shared_ptr<const DeviceCurve>> curves;  // [views]; none on a mesh of one shard
  AdamHistory history{};
};

struct StageTime {
  const char* stage;
  double seconds;
};

struct Frame {
  std::vector<View> views;
  RenderSettings settings;
  // [views], or [shards * views] where each shard has its own; after stage "blend" unchanged until the way
  // back is done
  std::vector<ImagePointers> images;
  SplatColumns columns{};
  AdamState state{};  // all null: no replay
  AdamHistory history{};
  bool replays = false;                    // state and history are set
  const Cells* cells = nullptr;            // that bound the columns; null: all rows are walked
  std::shared_ptr<const void> keep_alive;  // whoever owns what columns, state and history point to
  std::vector<RowRange> homes;             // [shards], ascending
  TileRanges ranges;                       // whose tiles are whose
  std::vector<HaloPiece> halo;             // pixels that crossed for the loss; train_step
  std::vector<std::shared_ptr<const TileCurve>> curves;  // [views], behind the pointers in `views`
  std::vector<ShardRecords> shards;                      // [shards]
  std::vector<std::vector<Parcel>> parcels;              // [home][owner]
  std::vector<TileOwner> owners;                         // [shards]
  std::vector<ShardConstants> constants;                 // [shards]; CUDA flavour
  // CUDA flavour, several shards, from stage "project" to "assign": what each home has in each run of tiles
  // (tiles_of_run), or about that: [shards, runs] TileCount.
  std::vector<uint64_t> run_table;
  std::vector<StageTime> times;  // in the order they ran
  FrameLinks links;

  bool all_pinholes() const {
    for (const View& view : views) {
      if (view.model != CameraModel::kPinhole) return false;
    }
    return true;
  }
  const AdamState* state_or_null() const { return replays ? &state : nullptr; }
  const AdamHistory* history_or_null() const { return replays ? &history : nullptr; }
  int64_t tile_count() const {
    return views.empty() ? 0 : views.back().tile_begin + views.back().tile_count();
  }
  // Whether a shard's images and their gradients are its own memory.
  bool images_are_local() const { return images.size() > views.size(); }
  // Of `images`, or of gradients in the same order: what a shard uses of view `v`.
  template <typename T>
  const T& of_shard(const std::vector<T>& list, int shard, size_t v) const {
    return list[list.size() > views.size() ? static_cast<size_t>(shard) * views.size() + v : v];
  }
};

}  // namespace mgpu::splat
