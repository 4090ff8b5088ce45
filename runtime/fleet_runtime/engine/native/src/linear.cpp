#include "linear.h"

namespace rf {

#define RF_TILE(M) {tile_bf16<M, 1, 0>, tile_bf16<M, 1, 1>, tile_bf16<M, 1, 2>}
const Tiles kTiles = {
#if defined(__AVX512F__)
    {RF_TILE(1), RF_TILE(2), RF_TILE(3), RF_TILE(4), RF_TILE(5), RF_TILE(6), RF_TILE(7), RF_TILE(8)},
    {tile_int8<1, 1>, tile_int8<2, 1>, tile_int8<3, 1>, tile_int8<4, 1>, tile_int8<5, 1>, tile_int8<6, 1>},
#else
    {RF_TILE(1), RF_TILE(2), RF_TILE(3)},
    {tile_int8<1, 1>},
#endif
    {tile_bf16<1, 2, 0>, tile_bf16<1, 4, 0>},
    {tile_int8<1, 2>, tile_int8<1, 4>},
};

}  // namespace rf
