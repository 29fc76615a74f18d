// Gather and scatter between an engine's paged KV memory and kvd's objects, plain and as FP8.
//
// Words are those of kvd_client/paged.py: a *plane* is K or V of one layer (or its latent), cut in
// blocks at any stride; an object of n pages is, for each plane, its n pages in the given order.
//
//     plane p, page j of object o  <->  objects + o * object_stride + (p * pages + j) * page_bytes
//
// FP8 is kvd_client/fp8.py: e4m3fn codes and one power-of-two exponent a (plane, head) of an object.
// A page holds `rows` times `heads` runs of `run` values (tokens first: a row is a token and a run
// one head's vector; heads first: one row, and a run is a head's tokens).
//
// No header is included, and nothing but integer arithmetic is used, so that every byte is defined:
// the same file is compiled as C++ for the CPU (tests/cuda_cpu.h) and compared with the references.
//
// Block ids, strides and sizes are checked by the host before a launch. Strides are in bytes.
// Any grid and block size is right; kernels with FP8 want a block a (plane, head). The pieces of a
// launch (pages of planes of objects, or heads) are fewer than 2**31.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ------------------------------------------------------------------------------------------ plain

template <typename Unit>
static __device__ __forceinline__ void copy_pages(
    const u64* bases, const u64* strides, const int* blocks, u8* objects, u64 object_stride,
    u32 count, u32 planes, u32 pages, u32 page_bytes, bool gather)
{
    const u32 units = page_bytes / sizeof(Unit);
    const u32 pieces = count * planes * pages;
    for (u32 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const u32 page = piece % pages, row = piece / pages;      // 64-bit divisions take as long
        const u32 plane = row % planes, object = row / planes;    // as the copy of a page
        const int block = blocks[(u64)object * pages + page];
        if (block < 0) continue;  // a page that stays as it is
        Unit* paged = (Unit*)(bases[plane] + (u64)block * strides[plane]);
        Unit* place = (Unit*)(objects + object * object_stride
                              + ((u64)plane * pages + page) * page_bytes);
        Unit* to = gather ? place : paged;
        const Unit* from = gather ? paged : place;
        u32 i = threadIdx.x;
        for (; i + 3 * blockDim.x < units; i += 4 * blockDim.x) {  // four loads in flight
            const Unit a = from[i], b = from[i + blockDim.x];
            const Unit c = from[i + 2 * blockDim.x], d = from[i + 3 * blockDim.x];
            to[i] = a;
            to[i + blockDim.x] = b;
            to[i + 2 * blockDim.x] = c;
            to[i + 3 * blockDim.x] = d;
        }
        for (; i < units; i += blockDim.x) to[i] = from[i];
    }
}

// `_16` needs every base, stride, page_bytes and object_stride to be a multiple of 16; `_1` nothing.
#define KVD_COPY(NAME, UNIT, GATHER)                                                              \
    extern "C" __global__ void NAME(                                                              \
        const u64* bases, const u64* strides, const int* blocks, u8* objects, u64 object_stride,  \
        u32 count, u32 planes, u32 pages, u32 page_bytes)                                         \
    {                                                                                             \
        copy_pages<UNIT>(bases, strides, blocks, objects, object_stride, count, planes, pages,    \
                         page_bytes, GATHER);                                                     \
    }

KVD_COPY(kvd_gather_16, uint4, true)
KVD_COPY(kvd_gather_1, u8, true)
KVD_COPY(kvd_scatter_16, uint4, false)
KVD_COPY(kvd_scatter_1, u8, false)

// -------------------------------------------------------------------------------------- FP8 values
//
// Every value goes by way of the bits of a float32: a bfloat16 is its upper half, and each float16
// is one. A code with exponent field f is a float32 with field f + e + 120.

static __device__ __forceinline__ u32 umin(u32 a, u32 b) { return a < b ? a : b; }
static __device__ __forceinline__ u32 umax(u32 a, u32 b) { return a > b ? a : b; }

static __device__ __forceinline__ u32 wide_of_half(u32 half)
{
    const u32 sign = (half & 0x8000u) << 16;
    u32 field = half >> 10 & 31u, digits = half & 0x3FFu;
    if (field == 31u) return sign | 0x7F800000u | digits << 13;
    if (field == 0u) {
        if (digits == 0u) return sign;
        field = 1u;
        while (!(digits & 0x400u)) { digits <<= 1; field -= 1u; }  // at most ten times; may wrap
        digits &= 0x3FFu;
    }
    return sign | (field + 112u) << 23 | digits << 13;
}

// The bits of the float16 nearest to a float32, half to even. Only what decoding gives comes here:
// finite, at most 65504 in magnitude, or NaN.
static __device__ __forceinline__ u32 half_of_wide(u32 bits)
{
    const u32 sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u) return sign | 0x7E00u;
    if (magnitude < 0x33000001u) return sign;                     // up to half of 2**-24
    const u32 field = magnitude >> 23, digits = 0x800000u | (magnitude & 0x7FFFFFu);
    const u32 shift = field < 113u ? 126u - field : 13u;
    const u32 odd = digits >> shift & 1u, half = (1u << (shift - 1u)) - 1u;
    const u32 rounded = (digits + half + odd) >> shift;
    return sign | (rounded + (field < 113u ? 0u : (field - 113u) << 10));
}

// `_code32` of the codec: `one` is the exponent field of the smallest normal code, e + 121.
static __device__ __forceinline__ u32 code_of_wide(u32 bits, u32 one)
{
    const u32 magnitude = bits & 0x7FFFFFFFu, field = magnitude >> 23;
    const u32 digits = 0x800000u | (magnitude & 0x7FFFFFu);
    const u32 above = umax(field, one) - one, below = one - umin(field, one);
    const u32 shift = 20u + umin(below, 5u);
    const u32 odd = digits >> shift & 1u, half = (1u << (shift - 1u)) - 1u;
    u32 code = ((digits + half + odd) >> shift) + (umin(above, 30u) << 3);
    code = umin(code, 0x7Eu);
    if (magnitude > 0x7F800000u) code = 0x7Fu;
    return code | (bits >> 24 & 0x80u);
}

static __device__ __forceinline__ u32 wide_of_code(u32 code, int exponent)
{
    const u32 sign = (code & 0x80u) << 24;
    u32 size = code & 0x7Fu;
    if (size == 0u) return sign;
    if (size == 0x7Fu) return sign | 0x7FC00000u;
    u32 field = (u32)(exponent + 120);
    if (size < 8u) {                                              // size * 2**-9: normalise
        field += 1u;
        while (size < 8u) { size <<= 1; field -= 1u; }
        size &= 7u;
        return sign | field << 23 | size << 20;
    }
    return sign | (field << 23) + (size << 20);
}

static __device__ __forceinline__ int exponent_of(u32 largest, int low, int high)
{
    int exponent = (int)(largest >> 23) - 127 - 8;
    if ((largest & 0x7FFFFFu) > 0x680000u) exponent += 1;         // rounds above 1.75: saturates
    return exponent < low ? low : exponent > high ? high : exponent;
}

struct Bfloat { typedef u16 Item;
    static __device__ __forceinline__ u32 wide(u32 bits) { return bits << 16; }
    static __device__ __forceinline__ u32 item(u32 wide) { return wide >> 16; } };
struct Half { typedef u16 Item;
    static __device__ __forceinline__ u32 wide(u32 bits) { return wide_of_half(bits); }
    static __device__ __forceinline__ u32 item(u32 wide) { return half_of_wide(wide); } };
struct Float { typedef u32 Item;
    static __device__ __forceinline__ u32 wide(u32 bits) { return bits; }
    static __device__ __forceinline__ u32 item(u32 wide) { return wide; } };

// Eight values, or one, loaded and stored as a whole.
template <typename Item, int N> struct alignas(sizeof(Item) * N) Values { Item at[N]; };

// Where the i-th vector of (object, plane, head) lies in the paged memory and among the codes.
struct Walk {
    u32 vectors_run, vectors_page, heads, run, head;
    u64 page_values;
    __device__ __forceinline__ u64 value_in_page(u32 i, u32 n) const
    {
        const u32 row = i / vectors_run;
        return ((u64)row * heads + head) * run + (u64)(i - row * vectors_run) * n;
    }
};

// --------------------------------------------------------------------------------------- gather FP8

template <typename Kind, int N>
static __device__ __forceinline__ void gather_fp8(
    const u64* bases, const u64* strides, const int* blocks, u8* codes, u64 code_stride,
    u8* exponents, u64 exponent_stride, u32* wild, u32 count, u32 planes, u32 pages, u32 rows,
    u32 heads, u32 run, int low, int high)
{
    typedef typename Kind::Item Item;
    typedef Values<Item, N> Source;
    typedef Values<u8, N> Target;
    __shared__ u32 largest, untamed;
    const u32 items = count * planes * heads;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const u32 head = item % heads, row = item / heads;
        const u32 plane = row % planes, object = row / planes;
        const int* own = blocks + (u64)object * pages;
        const u64 base = bases[plane], stride = strides[plane];
        Walk walk = {run / N, rows * (run / N), heads, run, head, (u64)rows * heads * run};
        const u32 vectors = pages * walk.vectors_page;
        if (threadIdx.x == 0) { largest = 0u; untamed = 0u; }
        __syncthreads();
        u32 most = 0u, strange = 0u;
        for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) {
            const u32 page = i / walk.vectors_page;
            const u64 at = walk.value_in_page(i - page * walk.vectors_page, N);
            const Source v = *(const Source*)(base + (u64)own[page] * stride + at * sizeof(Item));
            for (int k = 0; k < N; k++) {
                const u32 magnitude = Kind::wide(v.at[k]) & 0x7FFFFFFFu;
                if (magnitude < 0x7F800000u) most = umax(most, magnitude); else strange = 1u;
            }
        }
        atomicMax(&largest, most);
        if (strange) atomicMax(&untamed, 1u);
        __syncthreads();
        const int exponent = exponent_of(largest, low, high);
        if (threadIdx.x == 0) {
            u8* place = exponents + object * exponent_stride + ((u64)plane * heads + head) * 2;
            place[0] = (u8)(exponent & 255);
            place[1] = (u8)(exponent >> 8 & 255);
            if (untamed && wild) atomicAdd(wild, 1u);
        }
        for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) {
            const u32 page = i / walk.vectors_page;
            const u64 at = walk.value_in_page(i - page * walk.vectors_page, N);
            const Source v = *(const Source*)(base + (u64)own[page] * stride + at * sizeof(Item));
            Target out;
            for (int k = 0; k < N; k++)
                out.at[k] = (u8)code_of_wide(Kind::wide(v.at[k]), (u32)(exponent + 121));
            *(Target*)(codes + object * code_stride
                       + ((u64)plane * pages + page) * walk.page_values + at) = out;
        }
        __syncthreads();                                          // before `largest` begins anew
    }
}

// -------------------------------------------------------------------------------------- scatter FP8

// An exponent out of bounds decodes to NaN, never to a value: the host refuses such objects before.
template <typename Kind, int N>
static __device__ __forceinline__ void scatter_fp8(
    const u64* bases, const u64* strides, const int* blocks, const u8* codes, u64 code_stride,
    const u8* exponents, u64 exponent_stride, u32 count, u32 planes, u32 pages, u32 rows,
    u32 heads, u32 run, int low, int high)
{
    typedef typename Kind::Item Item;
    typedef Values<u8, N> Source;
    typedef Values<Item, N> Target;
    const u32 items = count * planes * heads;
    for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
        const u32 head = item % heads, row = item / heads;
        const u32 plane = row % planes, object = row / planes;
        const int* own = blocks + (u64)object * pages;
        const u64 base = bases[plane], stride = strides[plane];
        Walk walk = {run / N, rows * (run / N), heads, run, head, (u64)rows * heads * run};
        const u32 vectors = pages * walk.vectors_page;
        const u8* place = exponents + object * exponent_stride + ((u64)plane * heads + head) * 2;
        const int exponent = (int)(short)(u16)(place[0] | place[1] << 8);
        const bool sound = exponent >= low && exponent <= high;
        for (u32 i = threadIdx.x; i < vectors; i += blockDim.x) {
            const u32 page = i / walk.vectors_page;
            if (own[page] < 0) continue;  // a page that stays as it is
            const u64 at = walk.value_in_page(i - page * walk.vectors_page, N);
            const Source v = *(const Source*)(codes + object * code_stride
                + ((u64)plane * pages + page) * walk.page_values + at);
            Target out;
            for (int k = 0; k < N; k++)
                out.at[k] = (Item)Kind::item(wide_of_code(sound ? v.at[k] : 0x7Fu, exponent));
            *(Target*)(base + (u64)own[page] * stride + at * sizeof(Item)) = out;
        }
    }
}

// `_8` needs `run` to be a multiple of 8, bases and strides of 8 items, codes and code_stride of 8
// bytes; `_1` nothing but whole items. Exponents lie at any address.
#define KVD_FP8(NAME, KIND, N)                                                                    \
    extern "C" __global__ void kvd_gather_fp8_##NAME(                                             \
        const u64* bases, const u64* strides, const int* blocks, u8* codes, u64 code_stride,      \
        u8* exponents, u64 exponent_stride, u32* wild, u32 count, u32 planes, u32 pages,          \
        u32 rows, u32 heads, u32 run, int low, int high)                                          \
    {                                                                                             \
        gather_fp8<KIND, N>(bases, strides, blocks, codes, code_stride, exponents,                \
                            exponent_stride, wild, count, planes, pages, rows, heads, run, low,   \
                            high);                                                                \
    }                                                                                             \
    extern "C" __global__ void kvd_scatter_fp8_##NAME(                                            \
        const u64* bases, const u64* strides, const int* blocks, const u8* codes,                 \
        u64 code_stride, const u8* exponents, u64 exponent_stride, u32 count, u32 planes,         \
        u32 pages, u32 rows, u32 heads, u32 run, int low, int high)                               \
    {                                                                                             \
        scatter_fp8<KIND, N>(bases, strides, blocks, codes, code_stride, exponents,               \
                             exponent_stride, count, planes, pages, rows, heads, run, low, high); \
    }

KVD_FP8(bfloat16_8, Bfloat, 8)
KVD_FP8(bfloat16_1, Bfloat, 1)
KVD_FP8(float16_8, Half, 8)
KVD_FP8(float16_1, Half, 1)
KVD_FP8(float32_4, Float, 4)
KVD_FP8(float32_1, Float, 1)
