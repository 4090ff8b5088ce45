#include "linear.h"

namespace rf {

#if defined(__AVX512F__)
const Tiles kTiles = {
    {tile_bf16<1, 1>, tile_bf16<2, 1>, tile_bf16<3, 1>, tile_bf16<4, 1>, tile_bf16<5, 1>, tile_bf16<6, 1>, tile_bf16<7, 1>, tile_bf16<8, 1>,
     tile_bf16<9, 1>, tile_bf16<10, 1>, tile_bf16<11, 1>, tile_bf16<12, 1>},
    {tile_int8<1, 1>, tile_int8<2, 1>, tile_int8<3, 1>, tile_int8<4, 1>, tile_int8<5, 1>, tile_int8<6, 1>, tile_int8<7, 1>, tile_int8<8, 1>,
     tile_int8<9, 1>, tile_int8<10, 1>, tile_int8<11, 1>, tile_int8<12, 1>},
    tile_bf16<1, kWide>,
    tile_int8<1, kWide>,
};
#else
const Tiles kTiles = {
    {tile_bf16<1, 1>, tile_bf16<2, 1>, tile_bf16<3, 1>},
    {tile_int8<1, 1>, tile_int8<2, 1>, tile_int8<3, 1>},
    tile_bf16<1, kWide>,
    tile_int8<1, kWide>,
};
#endif

}  // namespace rf
