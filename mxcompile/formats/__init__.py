"""Formats as values (`types`), the table of precisions made of them (`precisions`), casts in plain torch."""

from mxcompile.formats.precisions import KEPT as KEPT
from mxcompile.formats.precisions import PRECISIONS as PRECISIONS
from mxcompile.formats.precisions import Choices as Choices
from mxcompile.formats.precisions import Operands as Operands
from mxcompile.formats.precisions import Precision as Precision
from mxcompile.formats.precisions import Tiles as Tiles
from mxcompile.formats.precisions import is_quantized as is_quantized
from mxcompile.formats.precisions import label as label
from mxcompile.formats.precisions import labels as labels
from mxcompile.formats.types import BLOCK as BLOCK
from mxcompile.formats.types import E4M3 as E4M3
from mxcompile.formats.types import E5M2 as E5M2
from mxcompile.formats.types import ELEM_TYPES as ELEM_TYPES
from mxcompile.formats.types import NEAREST as NEAREST
from mxcompile.formats.types import SCALE_NAN as SCALE_NAN
from mxcompile.formats.types import WHOLE as WHOLE
from mxcompile.formats.types import ElemType as ElemType
from mxcompile.formats.types import Format as Format
from mxcompile.formats.types import Rounding as Rounding
from mxcompile.formats.types import ScaleLayout as ScaleLayout
from mxcompile.formats.types import ScaleType as ScaleType
from mxcompile.formats.types import Tile as Tile
from mxcompile.formats.types import elem_type as elem_type
from mxcompile.formats.types import num_blocks as num_blocks
from mxcompile.formats.types import rounding as rounding
from mxcompile.formats.types import scale_layout as scale_layout
