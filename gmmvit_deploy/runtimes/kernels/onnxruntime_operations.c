/* The operation MaskedAttention of ONNX Runtime's graphs, computed by masked_attention.c on the session's threads.

   Inputs: what Q, K and V lie in, float32 (B, n, columns) or (B, windows, n, columns), which may be the same tensor; if
   `queries` is not n, Q lies in (B, queries, columns) or (B, windows, queries, columns). Then, each of which may be
   missing, the mask as the kernel wants it, the bias likewise, and the two mixings (heads, heads).
   Output: float32, the shape of what Q lies in but for heads * d columns.
   Attributes: heads, queries, n, d; mask_heads, bias_heads: heads, or 1 where all heads share the mask, or the bias;
   windows: that have a bias each; grid: of the mask's layout; q_column, k_column, v_column: the first of each; scale.

   ONNX Runtime's package brings no headers. Its interface in C is a table of functions whose places never change
   (https://onnxruntime.ai/docs/api/c); the few that are needed are declared here, by their places. */

#include "masked_attention.h"

#include <stddef.h>
#include <stdlib.h>

typedef struct OrtStatus OrtStatus; /* NULL: all is well */
typedef struct OrtValue OrtValue;
typedef struct OrtShape OrtShape;
typedef struct OrtContext OrtContext;
typedef struct OrtInfo OrtInfo;
typedef struct OrtDomain OrtDomain;
typedef struct OrtOptions OrtOptions;

enum { API_VERSION = 17, FAIL = 1, FLOAT = 1, REQUIRED = 0, OPTIONAL = 1, ON_CPU = 0, MOST_DIMENSIONS = 4, RUNS = 32 };

/* Places in the table. */
enum {
    CREATE_STATUS = 0,
    CREATE_DOMAIN = 26,
    DOMAIN_ADD = 27,
    ADD_DOMAIN = 28,
    TENSOR_DATA = 51,
    DIMENSIONS_COUNT = 61,
    DIMENSIONS = 62,
    TENSOR_SHAPE = 65,
    ATTRIBUTE_FLOAT = 85,
    ATTRIBUTE_INT = 86,
    CONTEXT_INPUT = 90,
    CONTEXT_OUTPUT = 91,
    RELEASE_SHAPE = 99,
    CONTEXT_PARALLEL_FOR = 274, /* since 1.17 */
};

typedef void (*Function)(void);
typedef const Function *Api;

typedef struct {
    Api (*get)(uint32_t version);
    const char *(*version)(void);
} ApiBase;

#define CALL(api, place, type) ((type)(api)[place])

/* What ONNX Runtime asks an operation for; the places of version 17, of which NULL are those that need no answer. */
typedef struct Operation Operation;
struct Operation {
    uint32_t version;
    void *(*create)(const Operation *, Api, const OrtInfo *);
    const char *(*name)(const Operation *);
    const char *(*provider)(const Operation *);
    int (*input_type)(const Operation *, size_t);
    size_t (*inputs)(const Operation *);
    int (*output_type)(const Operation *, size_t);
    size_t (*outputs)(const Operation *);
    void (*compute)(void *, OrtContext *);
    void (*destroy)(void *);
    int (*input_characteristic)(const Operation *, size_t);
    int (*output_characteristic)(const Operation *, size_t);
    int (*memory)(const Operation *, size_t);
    int (*variadic[4])(const Operation *);
    OrtStatus *(*create_checked)(const Operation *, Api, const OrtInfo *, void **);
    OrtStatus *(*compute_checked)(void *, OrtContext *);
    Function infer_shape;
    int (*first_version)(const Operation *);
    int (*last_version)(const Operation *);
    Function in_place[4];
};

/* One node of a graph. */
typedef struct {
    Api api;
    int64_t heads, queries, n, d, mask_heads, bias_heads, windows, grid, columns[3];
    float scale;
} Node;

/* ---- making a node ------------------------------------------------------------------------------------------------ */

static OrtStatus *failure(Api api, const char *why) {
    return CALL(api, CREATE_STATUS, OrtStatus *(*)(int, const char *))(FAIL, why);
}

static OrtStatus *integer(Api api, const OrtInfo *info, const char *name, int64_t *value) {
    return CALL(api, ATTRIBUTE_INT, OrtStatus *(*)(const OrtInfo *, const char *, int64_t *))(info, name, value);
}

static OrtStatus *create(const Operation *self, Api api, const OrtInfo *info, void **kernel) {
    (void)self;
    static const char *names[] = {"heads",   "queries", "n",    "d",        "mask_heads", "bias_heads",
                                  "windows", "grid",    "q_column", "k_column", "v_column"};
    enum { INTEGERS = sizeof names / sizeof *names };
    Node *node = calloc(1, sizeof *node);
    if (!node) return failure(api, "MaskedAttention: no memory is left");
    int64_t *values[] = {&node->heads,      &node->queries, &node->n,    &node->d,          &node->mask_heads,
                         &node->bias_heads, &node->windows, &node->grid, &node->columns[0], &node->columns[1],
                         &node->columns[2]};
    node->api = api;
    OrtStatus *wrong = NULL;
    for (int i = 0; i < INTEGERS && !wrong; i++) wrong = integer(api, info, names[i], values[i]);
    if (!wrong)
        wrong = CALL(api, ATTRIBUTE_FLOAT, OrtStatus *(*)(const OrtInfo *, const char *, float *))(info, "scale",
                                                                                                   &node->scale);
    if (wrong) free(node);
    else *kernel = node;
    return wrong;
}

/* ---- running it --------------------------------------------------------------------------------------------------- */

typedef struct {
    size_t rank;
    int64_t sizes[MOST_DIMENSIONS];
} Shape;

/* Reads the numbers and, if `shape` is not NULL, the shape of input `index`; data is NULL for an absent input. */
static OrtStatus *input(const Node *node, OrtContext *context, size_t index, const float **data, Shape *shape) {
    const Api api = node->api;
    const OrtValue *value = NULL;
    OrtStatus *wrong = CALL(api, CONTEXT_INPUT, OrtStatus *(*)(OrtContext *, size_t, const OrtValue **))(
        context, index, &value);
    *data = NULL;
    if (wrong || !value) return wrong;
    wrong = CALL(api, TENSOR_DATA, OrtStatus *(*)(const OrtValue *, const float **))(value, data);
    if (wrong || !shape) return wrong;
    OrtShape *measured = NULL;
    wrong = CALL(api, TENSOR_SHAPE, OrtStatus *(*)(const OrtValue *, OrtShape **))(value, &measured);
    if (!wrong) wrong = CALL(api, DIMENSIONS_COUNT, OrtStatus *(*)(const OrtShape *, size_t *))(measured, &shape->rank);
    if (!wrong && (shape->rank < 3 || shape->rank > MOST_DIMENSIONS))
        wrong = failure(api, "MaskedAttention: expected three or four dimensions");
    if (!wrong)
        wrong = CALL(api, DIMENSIONS, OrtStatus *(*)(const OrtShape *, int64_t *, size_t))(measured, shape->sizes, shape->rank);
    if (measured) CALL(api, RELEASE_SHAPE, void (*)(OrtShape *))(measured);
    return wrong;
}

typedef struct {
    MaskedAttention what;
    int64_t pieces, runs;
    int failed; /* all who fail write the same kind of number */
} Work;

/* Of some pieces that follow each other: a window's would be too little to call a thread for. */
static void run(void *data, size_t index) {
    Work *work = data;
    const int64_t first = work->pieces * (int64_t)index / work->runs;
    const int64_t last = work->pieces * ((int64_t)index + 1) / work->runs;
    const int failed = masked_attention(&work->what, first, last);
    if (failed) __atomic_store_n(&work->failed, failed, __ATOMIC_RELAXED);
}

static OrtStatus *compute(void *kernel, OrtContext *context) {
    const Node *node = kernel;
    const Api api = node->api;
    Work work = {{0}, 0, 0, 0};
    MaskedAttention *what = &work.what;
    const float *mask = NULL;
    const float *part = NULL, **constants[] = {&mask, &what->bias, &what->before, &what->after};
    const void **parts[] = {&what->q, &what->k, &what->v};
    int64_t *rows[] = {&what->q_row, &what->k_row, &what->v_row};
    Shape shape = {0, {0}}; /* of the output: what Q lies in, but for the columns */
    int64_t batch = 1;
    OrtStatus *wrong = NULL;
    for (size_t i = 0; i < 3 && !wrong; i++) {
        Shape of_part = {0, {0}};
        wrong = input(node, context, i, &part, &of_part);
        if (wrong) break;
        const int64_t columns = of_part.sizes[of_part.rank - 1], tokens = i ? node->n : node->queries;
        int64_t images = 1;
        for (size_t place = 0; place + 2 < of_part.rank; place++) images *= of_part.sizes[place];
        if (!i) shape = of_part, batch = images;
        if (images != batch || of_part.sizes[of_part.rank - 2] != tokens ||
            columns < node->columns[i] + node->heads * node->d)
            wrong = failure(api,
                            "MaskedAttention: the tensor with Q, K and V has another shape than the node was made for");
        *rows[i] = columns;
        *parts[i] = part + node->columns[i];
    }
    for (size_t i = 0; i < 4 && !wrong; i++) wrong = input(node, context, 3 + i, constants[i], NULL);
    if (wrong) return wrong;
    what->mask = mask;
    shape.sizes[shape.rank - 1] = node->heads * node->d;
    OrtValue *out = NULL;
    wrong = CALL(api, CONTEXT_OUTPUT, OrtStatus *(*)(OrtContext *, size_t, const int64_t *, size_t, OrtValue **))(
        context, 0, shape.sizes, shape.rank, &out);
    if (!wrong) wrong = CALL(api, TENSOR_DATA, OrtStatus *(*)(OrtValue *, void **))(out, &what->out);
    if (wrong || !batch) return wrong;
    what->batch = (int32_t)batch;
    what->heads = (int32_t)node->heads;
    what->queries = (int32_t)node->queries;
    what->n = (int32_t)node->n;
    what->d = (int32_t)node->d;
    what->mask_heads = (int32_t)node->mask_heads;
    what->bias_heads = (int32_t)node->bias_heads;
    what->windows = (int32_t)node->windows;
    what->grid = (int32_t)node->grid;
    what->arithmetic = MASKED_ATTENTION_FLOAT32;
    what->scale = node->scale;
    work.pieces = masked_attention_pieces(what);
    work.runs = work.pieces < RUNS ? work.pieces : RUNS;
    wrong = CALL(api, CONTEXT_PARALLEL_FOR,
                 OrtStatus *(*)(OrtContext *, void (*)(void *, size_t), size_t, size_t, void *))(
        context, run, (size_t)work.runs, 0, &work);
    if (!wrong && work.failed)
        wrong = failure(api, work.failed == 2 ? "MaskedAttention: no memory is left"
                                              : "MaskedAttention: not a form or a processor for it");
    return wrong;
}

/* ---- what is asked about it --------------------------------------------------------------------------------------- */

static const char *name(const Operation *self) { return (void)self, "MaskedAttention"; }
static const char *provider(const Operation *self) { return (void)self, "CPUExecutionProvider"; }
static int type(const Operation *self, size_t index) { return (void)self, (void)index, FLOAT; }
static size_t inputs(const Operation *self) { return (void)self, 7; }
static size_t outputs(const Operation *self) { return (void)self, 1; }
static int input_characteristic(const Operation *self, size_t index) {
    return (void)self, index < 3 ? REQUIRED : OPTIONAL;
}
static int output_characteristic(const Operation *self, size_t index) { return (void)self, (void)index, REQUIRED; }
static int memory(const Operation *self, size_t index) { return (void)self, (void)index, ON_CPU; }
static int first_version(const Operation *self) { return (void)self, 1; }
static int last_version(const Operation *self) { return (void)self, 1; }

static const Operation OPERATION = {
    .version = API_VERSION,
    .name = name,
    .provider = provider,
    .input_type = type,
    .inputs = inputs,
    .output_type = type,
    .outputs = outputs,
    .destroy = free,
    .input_characteristic = input_characteristic,
    .output_characteristic = output_characteristic,
    .memory = memory,
    .create_checked = create,
    .compute_checked = compute,
    .first_version = first_version,
    .last_version = last_version,
};

/* What a session's options call when they are given this library. */
OrtStatus *RegisterCustomOps(OrtOptions *options, const ApiBase *base) {
    const Api api = base->get(API_VERSION);
    if (!api) return NULL; /* older than 1.17: the graph is refused, as one whose operation nobody knows */
    OrtDomain *domain = NULL; /* of a few bytes, and kept: it must outlive every session that was given it */
    OrtStatus *wrong = CALL(api, CREATE_DOMAIN, OrtStatus *(*)(const char *, OrtDomain **))("gmmvit", &domain);
    if (!wrong) wrong = CALL(api, DOMAIN_ADD, OrtStatus *(*)(OrtDomain *, const Operation *))(domain, &OPERATION);
    return wrong ? wrong : CALL(api, ADD_DOMAIN, OrtStatus *(*)(OrtOptions *, OrtDomain *))(options, domain);
}
