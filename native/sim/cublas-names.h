/*
 * cublas-names.h: nothing but the names in cublas.def, for the Makefile: the preprocessor puts the _64 forms together.
 */
#define RG_BLAS_CALL(symbol, ...) symbol
#define RG_BLAS_SET(symbol, ...) symbol
#define RG_BLAS_GET(symbol, ...) symbol
#define RG_BLAS_SPECIAL(symbol, ...) symbol
#include "cublas.def"
