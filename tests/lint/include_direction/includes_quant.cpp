#include "quant/format.h"
