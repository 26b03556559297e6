/* A plugin of qemu's user mode that counts the instructions that the emulated program executes, and finds the blocks of
 * straight-line code that execute most of them.
 *
 * Plugin interface, version 1 (qemu 5.2 to 8.2; Debian 12 has 7.2). Debian ships no header for it: the few declarations
 * needed are below, as docs/devel/tcg-plugins.rst of qemu describes them. The count is printed at exit on the stream of
 * `-d plugin`, and behind it the hottest blocks, the hottest first. Translated blocks are counted whole, which is exact for programs that raise no signals.
 *
 * cc -shared -fPIC -O2 -o libcount.so kernels/count_instructions.c
 * qemu-aarch64 -plugin ./libcount.so -d plugin PROGRAM
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t qemu_plugin_id_t;
typedef struct qemu_info_t qemu_info_t;
struct qemu_plugin_tb;
enum qemu_plugin_op { QEMU_PLUGIN_INLINE_ADD_U64 };

extern void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, struct qemu_plugin_tb *));
extern void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, enum qemu_plugin_op, void *, uint64_t);
extern void qemu_plugin_register_atexit_cb(qemu_plugin_id_t, void (*)(qemu_plugin_id_t, void *), void *);
extern uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
extern size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
extern void qemu_plugin_outs(const char *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

/* A translated block; the same code may be translated more than once. */
struct block {
    struct block *next;
    uint64_t start, instructions, executed;
};

static struct block *blocks;

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *code)
{
    struct block *block = calloc(1, sizeof *block);
    (void)id;
    if (!block)
        abort();
    block->start = qemu_plugin_tb_vaddr(code);
    block->instructions = qemu_plugin_tb_n_insns(code);
    block->next = blocks;
    blocks = block;
    qemu_plugin_register_vcpu_tb_exec_inline(code, QEMU_PLUGIN_INLINE_ADD_U64, &block->executed, block->instructions);
}

static void at_exit(qemu_plugin_id_t id, void *data)
{
    char line[128];
    uint64_t all = 0;
    (void)id;
    (void)data;
    for (const struct block *block = blocks; block; block = block->next)
        all += block->executed;
    snprintf(line, sizeof line, "instructions: %" PRIu64 "\n", all);
    qemu_plugin_outs(line);
    for (int rank = 0; rank < 32; rank++) {
        struct block *most = blocks;
        for (struct block *block = blocks; block; block = block->next)
            if (block->executed > most->executed)
                most = block;
        if (!most || !most->executed)
            return;
        snprintf(line, sizeof line, "hot: %" PRIx64 "\n", most->start);
        qemu_plugin_outs(line);
        most->executed = 0;
    }
}

__attribute__((visibility("default"))) int qemu_plugin_install(qemu_plugin_id_t id, const qemu_info_t *info, int argc,
                                                               char **argv)
{
    (void)info;
    (void)argc;
    (void)argv;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, at_exit, NULL);
    return 0;
}
