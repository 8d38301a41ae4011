/*
 * layout.c: the layout of shared memory as JSON (layout.h).
 */
#include "layout.h"

#include <stdarg.h>
#include <stdio.h>

void rg_layout_put(rg_layout *l, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(l->text + l->at, l->size - l->at, format, arguments);
    va_end(arguments);
    size_t room = l->size - l->at - 1;
    l->at += n < 0 ? 0 : (size_t)n < room ? (size_t)n : room;
}

void rg_layout_names(rg_layout *l, const char *name, const char *const *words, int count)
{
    rg_layout_put(l, ",\"%s\":[", name);
    for (int i = 0; i < count; i++)
        rg_layout_put(l, "%s\"%s\"", i ? "," : "", words[i]);
    rg_layout_put(l, "]");
}

void rg_layout_section(rg_layout *l, const char *name, size_t offset, size_t stride, size_t rows, const rg_layout_field *fields,
                       size_t count)
{
    rg_layout_put(l, ",\"%s\":{\"offset\":%zu,\"stride\":%zu,\"count\":%zu,\"fields\":{", name, offset, stride, rows);
    for (size_t i = 0; i < count; i++)
        rg_layout_put(l, "%s\"%s\":{\"offset\":%zu,\"type\":\"%s\",\"count\":%d}", i ? "," : "", fields[i].name, fields[i].offset,
                      fields[i].type, fields[i].count);
    rg_layout_put(l, "}}");
}
