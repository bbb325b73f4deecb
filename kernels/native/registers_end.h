/* Undoes registers.h, before the next width or instruction set. */
#undef key_t
#undef key_of
#undef ABS_BITS
#undef vec
#undef LANES
#undef EACH_STEP
#undef SFX_WIDTH
