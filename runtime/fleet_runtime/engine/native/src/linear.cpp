#include "linear.h"

namespace rf {

const Tiles kTiles = {
#if defined(__AVX512F__)
    {tile_bf16<1, 1>, tile_bf16<2, 1>, tile_bf16<3, 1>, tile_bf16<4, 1>, tile_bf16<5, 1>, tile_bf16<6, 1>, tile_bf16<7, 1>, tile_bf16<8, 1>},
    {tile_int8<1, 1>, tile_int8<2, 1>, tile_int8<3, 1>, tile_int8<4, 1>, tile_int8<5, 1>, tile_int8<6, 1>},
#else
    {tile_bf16<1, 1>, tile_bf16<2, 1>, tile_bf16<3, 1>},
    {tile_int8<1, 1>},
#endif
    {tile_bf16<1, 2>, tile_bf16<1, 4>},
    {tile_int8<1, 2>, tile_int8<1, 4>},
};

}  // namespace rf
