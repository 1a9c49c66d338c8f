// SPDX-License-Identifier: Apache-2.0
// blend_strips.cuh: for variant "strips" of forward_variants.py: takes the place of cuda/splat/blend.cu from
// BlendShared to blend_owner. Warps of a tile do not wait for each other: each tests the tile's records for
// its own two patches and keeps those that it meets. The first bucket of a patch has a place of its own and
// keeps no state, which is that of an empty pixel.

// What a warp keeps in shared memory.
template <bool kKeepsDepth>
struct BlendShared {
  StagedRecord next[kWarp];  // as the copies bring them
  float2 half_extent[kWarp];
  StagedRecord met[kMet];  // those of the last ones that some patch of the warp meets
  StagedRecord nobody;     // lights nothing
  // of each patch: addresses in `met`, below 64 KB as all of this
  alignas(8) uint16_t list[kLanePixels][kMet + kTogether];
  // the bucket that a patch is filling: records, and addresses of those that are in `met`
  uint32_t lit[kLanePixels][kBucket];
  float4 start[kLanePixels][kWarp];  // T (-1: ended), red, green, blue before the bucket
  float start_depth[kLanePixels][kKeepsDepth ? kWarp : 1];
};

// The number of a lane's pixel in its patch, in buckets' order: that of two pixels a lane.
template <int kPixels>
__device__ __forceinline__ int pixel_number(int patch_lane, int p) {
  if (kPixels == kLanePixels) return p * kLanes + patch_lane;
  const int row = patch_lane / math::kPatchX;
  return row % kLanePixels * kLanes + row / kLanePixels * math::kPatchX + patch_lane % math::kPatchX;
}

// By a warp: kPixels neighbouring patches of a tile, the first of which is `first_patch`; the tile's records
// are [begin, begin + count) of the lists.
template <bool kDepth, bool kBackward, int kPixels>
__device__ __forceinline__ void blend_patches(const ViewList& views, const BlendInput& in,
                                              const BucketTarget& out,
                                              BlendShared<kDepth && kBackward>& shared, int64_t tile,
                                              int first_patch, int64_t begin, int64_t count) {
  constexpr int kLanes = math::kPatchX * math::kPatchY / kPixels, kSides = kWarp / kLanes;
  constexpr int kAtOnce = kPixels == 1 ? 4 : 2;  // records whose alphas are taken before one is blended
  static_assert(kTogether % kAtOnce == 0);
  const TilePlace place = place_of(views, in.first_tile + tile);
  const ViewImages view = views[place.view];
  const int lane = threadIdx.x % kWarp, patch_lane = lane % kLanes;
  const int own = lane / kLanes, patch = first_patch + own;  // of the warp, of the tile
  const int patch_x = place.x + patch % math::kPatchesAcross * math::kPatchX;
  const int patch_y = place.y + patch / math::kPatchesAcross * math::kPatchY;
  const int column = patch_x + patch_lane % math::kPatchX,
            row = patch_y + patch_lane / math::kPatchX * kPixels;
  const unsigned side = kSides == 1 ? kAllLanes : side_mask();
  const float x = static_cast<float>(column) + 0.5f;

  bool inside[kPixels];
  math::PatchPixel pixel[kPixels];
  float red[kPixels] = {}, green[kPixels] = {}, blue[kPixels] = {}, depth[kPixels] = {};
  for (int p = 0; p < kPixels; ++p) {
    inside[p] = column < view.width && row + p < view.height;
    pixel[p] = {1.f, inside[p] ? math::kAlphaMin : math::kNever};
  }
  const auto alive = [&] {
    static_assert(kPixels <= 2);
    return math::smaller(pixel[0].least, pixel[kPixels - 1].least) < math::kNever;
  };

  // the bucket: where its list ends, how many of it are known by number, where it will go
  const uint32_t lit_begin = shared_address(shared.lit[own]);
  uint32_t lit_end = lit_begin;
  int numbered = 0;
  const int32_t patches = static_cast<int32_t>(in.tiles) * math::kTilePatches;
  const int32_t first_slot = static_cast<int32_t>(tile) * math::kTilePatches + patch;
  int32_t slot = first_slot;  // -1: not known yet; after the first one only the first lane knows
  const auto open_bucket = [&] {
    for (int p = 0; p < kPixels; ++p) {
      const float before = pixel[p].least < math::kNever ? pixel[p].transmittance : -1.f;
      shared.start[p][lane] = make_float4(before, red[p], green[p], blue[p]);
      if constexpr (kDepth) shared.start_depth[p][lane] = depth[p];
    }
  };
  const auto record_at = [&](int i) {
    const uint32_t lit = shared.lit[own][i];
    return i < numbered ? lit : __float_as_uint(load_shared(lit + offsetof(StagedRecord, further) + 8));
  };
  const auto close_bucket = [&](bool mine) {  // all of the warp comes here
    const int32_t to = __shfl_sync(kAllLanes, slot, 0, kLanes);
    const int lit = static_cast<int>(lit_end - lit_begin) / 4;
    __syncwarp();
    if (mine) {
      if (to >= out.room) __trap();  // cannot be: there is room for all that can be met
      for (int p = 0; p < kPixels; ++p) {
        const int i = p * kLanes + patch_lane;
        const int64_t first = int64_t{to} * kBucket, at = first + pixel_number<kPixels>(patch_lane, p);
        if (i < lit) out.record[first + i] = static_cast<int32_t>(record_at(i));
        if (to < patches) continue;  // what a patch starts with is known
        out.state[at] = shared.start[p][lane];
        if constexpr (kDepth) out.depth[at] = shared.start_depth[p][lane];
      }
      if (patch_lane == 0)
        reinterpret_cast<int4*>(out.bucket)[to] =
            make_int4(first_slot, place.view * 64 + lit, patch_x, patch_y);
      slot = patch_lane == 0 ? -1 : 0;
      lit_end = lit_begin;
      numbered = 0;
      open_bucket();
    }
    __syncwarp();
  };

  // Entries are known a group of 32 before their records are asked for, and these a group before their use.
  const auto entry_of = [&](int64_t group) {
    return group + lane < count ? in.entry[begin + group + lane] : -1;
  };
  const auto ask = [&](int32_t id) {
    if (id < 0) return;
    const uint32_t to = shared_address(&shared.next[lane]);
    const char* from = reinterpret_cast<const char*>(in.record + id);
    for (int i = 0; i < 3; ++i) copy_16(to + 16 * i, from + 16 * i);
    copy_8(shared_address(&shared.half_extent[lane]), in.half_extent + id);
  };
  if constexpr (kBackward) open_bucket();
  if (lane == 0) shared.nobody = StagedRecord{};
  int32_t id = entry_of(0), next_id = entry_of(kWarp);
  ask(id);
  int held = 0, length[kSides] = {};
  for (int64_t group = 0; group < count; group += kWarp) {
    copies_done();
    uint32_t bits = 0;
    StagedRecord mine;
    if (id >= 0) {
      mine = shared.next[lane];
      const float2 half = shared.half_extent[lane];
      const float mean2d[2] = {mine.shape.x, mine.shape.y}, half_extent[2] = {half.x, half.y};
      const float conic[3] = {mine.shape.z, mine.shape.w, mine.rest.x};
      bits = math::patches_met<1>(mean2d, conic, half_extent, static_cast<float>(place.x),
                                  static_cast<float>(patch_y));
      if (kSides == 1) bits = bits >> first_patch % math::kPatchesAcross & 1u;
      const math::Falloff falloff = math::make_falloff(conic);
      mine.shape.z = falloff.a;
      mine.shape.w = falloff.b;
      mine.rest.x = falloff.c;
      mine.further.z = __int_as_float(id);
    }
    __syncwarp();
    id = next_id;
    ask(id);
    next_id = entry_of(group + 2 * kWarp);
    const unsigned before = (1u << lane) - 1u, met = __ballot_sync(kAllLanes, bits != 0);
    StagedRecord* const to = shared.met + held + __popc(met & before);
    if (bits) *to = mine;
    held += __popc(met);
#pragma unroll
    for (int i = 0; i < kSides; ++i) {
      const unsigned lanes = __ballot_sync(kAllLanes, bits >> i & 1);
      if (bits >> i & 1)
        shared.list[i][length[i] + __popc(lanes & before)] = static_cast<uint16_t>(shared_address(to));
      length[i] += __popc(lanes);
    }
    if (held <= kMet - kWarp && group + kWarp < count) continue;

    const int longest = max(length[0], length[kSides - 1]);
    uint16_t* list = shared.list[own];
    for (int i = (lane < kLanes ? length[0] : length[kSides - 1]) + patch_lane; i < longest + kTogether - 1;
         i += kLanes)
      list[i] = static_cast<uint16_t>(shared_address(&shared.nobody));
    __syncwarp();
    bool any_alive = true;
    for (int at = 0; at < longest; at += kTogether) {
      static_assert(kTogether == 4);
      const uint2 packed = *reinterpret_cast<const uint2*>(list + at);
      const uint32_t address[kTogether] = {packed.x & 0xffffu, packed.x >> 16, packed.y & 0xffffu,
                                           packed.y >> 16};
#pragma unroll
      for (int i0 = 0; i0 < kTogether; i0 += kAtOnce) {
        LaneRecord record[kAtOnce];
        float alpha[kAtOnce][kPixels];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          record[i] = load_record<kDepth>(address[i0 + i], x);
          for (int p = 0; p < kPixels; ++p)
            alpha[i][p] = math::alpha_at(record[i].column, static_cast<float>(row + p) + 0.5f);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          bool contributes = false;
          for (int p = 0; p < kPixels; ++p) {
            const math::PatchStep step = math::patch_step(alpha[i][p], pixel[p]);
            red[p] = math::mul_add(step.weight, record[i].red, red[p]);
            green[p] = math::mul_add(step.weight, record[i].green, green[p]);
            blue[p] = math::mul_add(step.weight, record[i].blue, blue[p]);
            if constexpr (kDepth) depth[p] = math::mul_add(step.weight, record[i].depth, depth[p]);
            contributes |= step.contributes;
          }
          if constexpr (kBackward) append_if_any(contributes, side, address[i0 + i], lit_end);
        }
      }
      if constexpr (kBackward) {
        if (slot < 0 && lit_end != lit_begin)
          slot = patches + atomicAdd(out.count, 1);  // early: used when full
        const bool full = lit_end > lit_begin + 4 * (kBucket - kTogether);
        if (__any_sync(kAllLanes, full)) close_bucket(full);
      }
      any_alive = __any_sync(kAllLanes, alive());
      if (!any_alive) break;
    }
    if (!any_alive) break;
    if constexpr (kBackward) {  // these records go
      const int lit = static_cast<int>(lit_end - lit_begin) / 4;
      __syncwarp();
      for (int i = patch_lane; i < lit; i += kLanes) shared.lit[own][i] = record_at(i);
      numbered = lit;
    }
    __syncwarp();
    held = 0;
    for (int i = 0; i < kSides; ++i) length[i] = 0;
  }
  if constexpr (kBackward) {
    const bool unused = slot == first_slot && lit_end == lit_begin;
    close_bucket(lit_end != lit_begin);
    if (unused && patch_lane == 0 && first_slot < out.room) out.bucket[first_slot] = PatchBucket{};
  }
  copies_done();
  for (int p = 0; p < kPixels; ++p) {
    if (!inside[p]) continue;
    const int64_t to = int64_t{row + p} * view.width + column;
    float* rgb = view.image.rgb + 3 * to;
    rgb[0] = math::mul_add(pixel[p].transmittance, in.background[0], red[p]);
    rgb[1] = math::mul_add(pixel[p].transmittance, in.background[1], green[p]);
    rgb[2] = math::mul_add(pixel[p].transmittance, in.background[2], blue[p]);
    view.image.accumulation[to] = 1.f - pixel[p].transmittance;
    if constexpr (kDepth) {
      if (view.image.depth) view.image.depth[to] = depth[p];
    }
  }
}

// First the heavy tiles, a warp a patch, then the others, a warp two patches. Warps wait for nobody.
template <bool kDepth, bool kBackward>
__global__ void __launch_bounds__(kBlendWarps* kWarp, kBlendBlocks)
    blend_kernel(const __grid_constant__ ViewList views, const __grid_constant__ BlendInput in,
                 const __grid_constant__ BucketTarget out) {
  __shared__ BlendShared<kDepth && kBackward> shared[kBlendWarps];
  constexpr int kStrips = math::kTilePatches / kSides;  // warps of a tile
  const int warp = threadIdx.x / kWarp;
  const int64_t number = int64_t{blockIdx.x} * kBlendWarps + warp;
  const int64_t other = number - math::kTilePatches * in.heavy_room;
  if (other < 0) {
    const int64_t place = number / math::kTilePatches;
    if (place >= in.heavy_count[0] && place < in.heavy_room - in.heavy_count[1]) return;
    const int64_t tile = in.heavy[place], begin = in.tile_begin[tile];
    blend_patches<kDepth, kBackward, 1>(views, in, out, shared[warp], tile,
                                        static_cast<int>(number % math::kTilePatches), begin,
                                        in.tile_begin[tile + 1] - begin);
  } else {
    const int64_t tile = other / kStrips, begin = in.tile_begin[tile],
                  count = in.tile_begin[tile + 1] - begin;
    if (count > in.heavy_length) return;
    blend_patches<kDepth, kBackward, kLanePixels>(views, in, out, shared[warp], tile,
                                                  static_cast<int>(other % kStrips) * kSides, begin, count);
  }
}

