/* What instructions the processor has, asked of the processor or the kernel of Linux, and what the user allows. */

#include "instruction_sets.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SETS = AVX512_BF16 + 1 };

static const char *const NAMES[SETS] = {"", "neon", "neon-bf16", "avx2", "avx512", "avx512-bf16"};

#if defined(__x86_64__) && defined(__GNUC__)

#include <cpuid.h>

static int has_bits(unsigned word, unsigned bits) { return (word & bits) == bits; }

/* The registers that the kernel of Linux keeps for each thread. */
static unsigned kept_registers(void) {
    unsigned low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (void)high, low;
}

static void examine(int has[SETS]) {
    enum { WIDE_REGISTERS = 0x06, WIDEST_REGISTERS = 0xe6 }; /* of 256 bits; of 512 bits */
    enum { OSXSAVE = 1 << 27, FMA = 1 << 12, AVX2_BIT = 1 << 5, BF16 = 1 << 5 };
    const unsigned f_dq_bw = 1u << 16 | 1u << 17 | 1u << 30, vl = 1u << 31;
    unsigned a = 0, b = 0, c = 0, d = 0, b7 = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has_bits(c, OSXSAVE | FMA)) return;
    const unsigned kept = kept_registers();
    if (!__get_cpuid_count(7, 0, &a, &b7, &c, &d)) return;
    has[AVX2] = has_bits(b7, AVX2_BIT) && has_bits(kept, WIDE_REGISTERS);
    has[AVX512] = has[AVX2] && has_bits(b7, f_dq_bw | vl) && has_bits(kept, WIDEST_REGISTERS);
    if (!has[AVX512] || !a) return; /* a: how many further parts leaf 7 has */
    has[AVX512_BF16] = __get_cpuid_count(7, 1, &a, &b, &c, &d) && has_bits(a, BF16);
}

/* oneDNN's variable limits the instructions of OpenVINO's own products. */
static int openvino_avoids_amx(void) {
    const char *limit = getenv("ONEDNN_MAX_CPU_ISA");
    return limit && strncmp(limit, "AVX512_CORE", 11) == 0 && !strstr(limit, "AMX");
}

static int examine_bytes(void) {
    enum { VNNI = 1 << 11, AMX_INT8 = 1 << 25 };
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && has_bits(c, VNNI) &&
           (!has_bits(d, AMX_INT8) || openvino_avoids_amx());
}

#elif defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

static void examine(int has[SETS]) {
    const unsigned long bf16 = 1ul << 14; /* HWCAP2_BF16 of Linux, which older headers do not name */
    has[NEON] = 1;
    has[NEON_BF16] = (getauxval(AT_HWCAP2) & bf16) != 0;
}

static int examine_bytes(void) { return 0; }

#else

static void examine(int has[SETS]) { (void)has; }
static int examine_bytes(void) { return 0; }

#endif

static int chosen = -1, multiplies_bytes; /* asked once: a virtual machine takes microseconds to answer */
static char why[256];

static void choose(void) {
    int has[SETS] = {0}, best = NO_INSTRUCTION_SET;
    char names[96] = "";
    examine(has);
    for (int set = SETS - 1; set > NO_INSTRUCTION_SET; set--) {
        if (!has[set]) continue;
        if (!best) best = set;
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", *names ? ", " : "", NAMES[set]);
    }
    const char *asked = getenv("GMMVIT_CPU_ISA");
    int set = best;
    if (asked && *asked)
        for (set = SETS - 1; set > NO_INSTRUCTION_SET && !(has[set] && !strcmp(asked, NAMES[set]));) set--;
    if (!best) snprintf(why, sizeof why, "this processor has neither AVX2 and FMA nor the instructions of 64-bit ARM");
    else if (!set)
        snprintf(why, sizeof why, "GMMVIT_CPU_ISA is %.40s, and this processor has %s; unset it, or set it to one of these",
                 asked, names);
    multiplies_bytes = set >= AVX512 && examine_bytes();
    __atomic_store_n(&chosen, set, __ATOMIC_RELEASE); /* all threads decide alike */
}

int gmmvit_instruction_set(void) {
    if (__atomic_load_n(&chosen, __ATOMIC_ACQUIRE) < 0) choose();
    return __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
}

int gmmvit_multiplies_bytes(void) { return gmmvit_instruction_set() && multiplies_bytes; }

const char *gmmvit_instruction_set_name(void) { return NAMES[gmmvit_instruction_set()]; }

const char *gmmvit_why_no_instruction_set(void) { return gmmvit_instruction_set() ? "" : why; }
