/*
 * copies.c: what test-library.c loads: small stand-ins for cuBLAS and NCCL, and what is linked with them. Made several times:
 *
 *   COPY=11, COPY=12   libcublas.so.N, whose names have a version as the real one's have
 *   USER=11, USER=12   a library that is linked with that one: userN() uses a handle as it should be
 *   PLUGIN             a library that has a cuBLAS and an NCCL of its own in it, as static linking makes one: plugin()
 *
 * A handle is good for the copy that made it alone; a use returns the number of calls that failed.
 */
#define PUBLIC __attribute__((visibility("default")))

enum { BAD_HANDLE = 1 };
typedef struct copy *handle;
int cublasCreate_v2(handle *out);
int cublasDestroy_v2(handle h);
int cublasSetMathMode(handle h, int value);
int cublasGetMathMode(handle h, int *value);
int cublasSgemm_v2(handle h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, const void *b, int ldb,
                   const void *beta, void *c, int ldc);
int cublasSaxpy_v2(handle h, int n, const void *alpha, const void *x, int incx, void *y, int incy); /* not one of cublas.def's */

#ifndef USER
struct copy {
    int math;
};
static struct copy only;

PUBLIC int cublasCreate_v2(handle *out)
{
    *out = &only;
    return 0;
}
PUBLIC int cublasDestroy_v2(handle h)
{
    return h == &only ? 0 : BAD_HANDLE;
}
PUBLIC int cublasSetMathMode(handle h, int value)
{
    only.math = value;
    return h == &only ? 0 : BAD_HANDLE;
}
PUBLIC int cublasGetMathMode(handle h, int *value)
{
    *value = only.math;
    return h == &only ? 0 : BAD_HANDLE;
}
PUBLIC int cublasSgemm_v2(handle h, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda, const void *b,
                          int ldb, const void *beta, void *c, int ldc)
{
    (void)ta, (void)tb, (void)m, (void)n, (void)k, (void)alpha, (void)a, (void)lda, (void)b, (void)ldb, (void)beta, (void)c, (void)ldc;
    return h == &only ? 0 : BAD_HANDLE;
}
PUBLIC int cublasSaxpy_v2(handle h, int n, const void *alpha, const void *x, int incx, void *y, int incy)
{
    (void)n, (void)alpha, (void)x, (void)incx, (void)y, (void)incy;
    return h == &only ? 0 : BAD_HANDLE;
}
#endif

#ifdef PLUGIN
int ncclCommInitRank(void **out, int size, int rank); /* the id between them is not looked at */
int ncclAllReduce(const void *from, void *to, unsigned long n, int type, int op, void *comm, void *stream);
int ncclGroupStart(void);
int ncclGroupEnd(void);
PUBLIC int ncclCommInitRank(void **out, int size, int rank)
{
    (void)size, (void)rank;
    *out = &only;
    return 0;
}
PUBLIC int ncclAllReduce(const void *from, void *to, unsigned long n, int type, int op, void *comm, void *stream)
{
    (void)from, (void)to, (void)n, (void)type, (void)op, (void)stream;
    return comm == &only ? 0 : BAD_HANDLE;
}
PUBLIC int ncclGroupStart(void)
{
    return 0;
}
PUBLIC int ncclGroupEnd(void)
{
    return 0;
}
#endif

#ifndef COPY
#define NAME__(a, b) a##b
#define NAME_(a, b) NAME__(a, b)
#ifdef USER
#define NAME NAME_(user, USER)
#else
#define NAME plugin
#endif
int NAME(void);
PUBLIC int NAME(void)
{
    handle h = 0;
    int value = 0, failed = cublasCreate_v2(&h) != 0;
    failed += cublasSetMathMode(h, 3) != 0;
    failed += cublasGetMathMode(h, &value) != 0 || value != 3;
    failed += cublasSgemm_v2(h, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 0, 0, 1) != 0;
    failed += cublasSaxpy_v2(h, 1, 0, 0, 1, 0, 1) != 0;
#ifdef PLUGIN
    failed += ncclGroupStart() != 0;
    failed += ncclAllReduce(0, 0, 1, 0, 0, &only, 0) != 0;
    failed += ncclGroupEnd() != 0;
#endif
    failed += cublasDestroy_v2(h) != 0;
    return failed;
}
#endif
