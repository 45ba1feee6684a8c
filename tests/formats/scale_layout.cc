#include "formats/scale_layout.h"

namespace fp4moe {

void copy_masked_scales_to_batched(const BatchedScales& layout, const uint8_t* linear,
                                   const int32_t* num_rows, uint8_t* batched) {
  const LinearScales one{layout.rows, layout.groups};
  for (int64_t e = 0; e < layout.experts; ++e)
    copy_scale_rows(one, linear + e * one.num_bytes(), layout.expert(), batched + layout.offset(e, 0, 0),
                    num_rows[e]);
}

void copy_masked_scales_to_linear(const BatchedScales& layout, const uint8_t* batched,
                                  const int32_t* num_rows, uint8_t* linear) {
  const LinearScales one{layout.rows, layout.groups};
  for (int64_t e = 0; e < layout.experts; ++e)
    copy_scale_rows(layout.expert(), batched + layout.offset(e, 0, 0), one, linear + e * one.num_bytes(),
                    num_rows[e]);
}

MmaScaleView MmaScaleView::of(const BatchedScales& layout) {
  const int64_t row_tiles = round_up(layout.rows, 128) / 128, group_tiles = round_up(layout.groups, 4) / 4;
  return {{32, 4, row_tiles, 4, group_tiles, layout.experts},
          {16, 4, group_tiles * 512, 1, 512, row_tiles * group_tiles * 512}};
}

std::array<int64_t, 6> MmaScaleView::index(int64_t e, int64_t m, int64_t g) {
  return {m % 32, m % 128 / 32, m / 128, g % 4, g / 4, e};
}

int64_t MmaScaleView::offset(const std::array<int64_t, 6>& i) const {
  int64_t sum = 0;
  for (size_t d = 0; d < i.size(); ++d) sum += i[d] * strides[d];
  return sum;
}

int64_t ExpertPackedScales::num_bytes() const {
  return first_row(num_experts(), first_token.back()) * round_up(groups, 4);
}

int64_t ExpertPackedScales::offset(int64_t e, int64_t m, int64_t g) const {
  const int64_t rows = first_token[e + 1] - first_token[e];
  return first_row(e, first_token[e]) * round_up(groups, 4) + Swizzled128x4Scales{rows, groups}.offset(m, g);
}

void pack_expert_scales(const ExpertPackedScales& layout, const uint8_t* linear, uint8_t* packed) {
  std::fill_n(packed, layout.num_bytes(), uint8_t{0});
  for (int64_t e = 0; e < layout.num_experts(); ++e) {
    const int64_t first = layout.first_token[e], rows = layout.first_token[e + 1] - first;
    copy_scale_rows(LinearScales{rows, layout.groups}, linear + first * layout.groups,
                    Swizzled128x4Scales{rows, layout.groups}, packed + layout.offset(e, 0, 0), rows);
  }
}

void unpack_expert_scales(const ExpertPackedScales& layout, const uint8_t* packed, uint8_t* linear) {
  for (int64_t e = 0; e < layout.num_experts(); ++e) {
    const int64_t first = layout.first_token[e], rows = layout.first_token[e + 1] - first;
    copy_scale_rows(Swizzled128x4Scales{rows, layout.groups}, packed + layout.offset(e, 0, 0),
                    LinearScales{rows, layout.groups}, linear + first * layout.groups, rows);
  }
}

}  // namespace fp4moe
