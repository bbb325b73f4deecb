/* The widths of one instruction set: see for_each_isa.h. */
#ifdef SFX_ALL_WIDTHS
#define SFX_WIDTH 16
#include "registers.h"
#include SFX_KERNELS
#include "registers_end.h"
#define SFX_WIDTH 64
#include "registers.h"
#include SFX_KERNELS
#include "registers_end.h"
#endif
#define SFX_WIDTH 32
#include "registers.h"
#include SFX_KERNELS
#include "registers_end.h"
