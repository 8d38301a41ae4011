/*
 * layout.h: the layout of shared memory as JSON, for those who read it without C (src/segment.ts, src/recording.ts).
 */
#ifndef RIGEL_LAYOUT_H
#define RIGEL_LAYOUT_H

#include <stddef.h>

/* One field of a structure: its type as in segment.h (u32, u64, words, char, hist), and how many there are. */
typedef struct {
    const char *name, *type;
    size_t offset;
    int count;
} rg_layout_field;

/* A text that is being written. What does not fit is left out, and then it is no JSON. */
typedef struct {
    char *text;
    size_t size, at;
} rg_layout;

/* rg_layout_put: adds to the text as printf does. */
__attribute__((format(printf, 2, 3))) void rg_layout_put(rg_layout *l, const char *format, ...);

/* rg_layout_names: adds ,"name":[...] with these words, which need no escapes. */
void rg_layout_names(rg_layout *l, const char *name, const char *const *words, int count);

/* rg_layout_section: adds ,"name":{...}, which tells of `rows` structures of `stride` bytes with these fields. */
void rg_layout_section(rg_layout *l, const char *name, size_t offset, size_t stride, size_t rows, const rg_layout_field *fields,
                       size_t count);

/* The member of a structure, which is of this type or an array of it, by the table of the type's fields. */
#define RG_LAYOUT_SECTION(l, whole, member, type, table) \
    do { \
        typedef type rg_section; \
        static const rg_layout_field fields[] = {table(RG_LAYOUT_FIELD)}; \
        rg_layout_section(l, #member, offsetof(whole, member), sizeof(type), sizeof(((whole *)0)->member) / sizeof(type), fields, \
                          sizeof fields / sizeof *fields); \
    } while (0)
#define RG_LAYOUT_FIELD(kind, name, n) {#name, #kind, offsetof(rg_section, name), n},

#endif
