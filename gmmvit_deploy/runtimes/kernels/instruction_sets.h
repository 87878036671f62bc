/* The instruction sets that the kernels are compiled for, and the choice of one when the program runs. */

#pragma once

#ifdef __cplusplus
extern "C" {
#endif

/* A later number is a better set. */
enum {
    NO_INSTRUCTION_SET = 0,
    NEON = 1,
    NEON_BF16 = 2,
    AVX2 = 3,
    AVX512 = 4,
    AVX512_BF16 = 5,
};

/* The best set that this processor has; or the set that the environment variable GMMVIT_CPU_ISA names, if the processor
   has it. Otherwise NO_INSTRUCTION_SET, and gmmvit_why_no_instruction_set() says why. The first call decides. */
int gmmvit_instruction_set(void);

/* Whether the chosen set is of AVX-512, and the processor has VNNI beside it, and no AMX for int8,
   or ONEDNN_MAX_CPU_ISA=AVX512_CORE… keeps OpenVINO from it. */
int gmmvit_multiplies_bytes(void);

/* "avx512-bf16", "avx512", "avx2", "neon-bf16" or "neon"; "" where there is none. */
const char *gmmvit_instruction_set_name(void);

/* "" where there is one. */
const char *gmmvit_why_no_instruction_set(void);

#ifdef __cplusplus
}
#endif
