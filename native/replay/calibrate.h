/* calibrate.h: what `rigel calibrate` runs. */
#ifndef RIGEL_CALIBRATE_H
#define RIGEL_CALIBRATE_H

/*
 * rg_calibrate: measures a device with kernels of its own, alone and in pairs, and prints JSON lines: {"step", "at", "of"} before each
 * measurement, and at the end {"device", "values", "pairs", "notes"}; src/calibrate.ts says what each value is. Returns the exit status.
 */
int rg_calibrate(int device);

#endif
