/* application/vnd.tightfit.frames (docs/streams.md), read and written: C99, one buffer, no allocation. */
#ifndef TIGHTFIT_FRAMES_H
#define TIGHTFIT_FRAMES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FRAMES_HEAD 8u
#define FRAMES_MOST 0x40000000u /* a frame is shorter; what is not is no frame */

enum frames_event {
    FRAMES_MORE,      /* all that was given is read: wait for more */
    FRAMES_FRAME,     /* buffer holds `json` bytes of JSON, and behind them `tensors` bytes of tensors */
    FRAMES_HEARTBEAT, /* an empty frame: the other side is there */
    FRAMES_TOO_LARGE, /* a frame that the buffer has no room for; it is skipped */
    FRAMES_INVALID,   /* a frame whose lengths contradict each other; it is skipped */
    FRAMES_BROKEN     /* no frame: close the connection */
};

struct frames_reader {
    uint8_t *buffer; /* JSON and tensors of one frame */
    uint32_t room;
    uint32_t json, tensors;
    uint32_t have, total, skip;
    uint8_t head[FRAMES_HEAD];
};

static inline uint32_t frames_get32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline void frames_put32(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)value;
    at[1] = (uint8_t)(value >> 8);
    at[2] = (uint8_t)(value >> 16);
    at[3] = (uint8_t)(value >> 24);
}

/* What to send before `json` bytes of JSON and `tensors` bytes of tensors. */
static inline void frames_head(uint8_t head[FRAMES_HEAD], uint32_t json, uint32_t tensors)
{
    frames_put32(head, 4u + json + tensors);
    frames_put32(head + 4, json);
}

static inline void frames_begin(struct frames_reader *reader, uint8_t *buffer, uint32_t room)
{
    memset(reader, 0, sizeof *reader);
    reader->buffer = buffer;
    reader->room = room;
}

static inline enum frames_event frames_drop(struct frames_reader *reader, uint32_t skip, enum frames_event event)
{
    reader->have = 0;
    reader->skip = skip;
    return event;
}

/* One byte of the head; FRAMES_MORE while there is nothing to say of it. */
static inline enum frames_event frames_read_head(struct frames_reader *reader, uint8_t byte)
{
    reader->head[reader->have++] = byte;
    if (reader->have == 4) {
        reader->total = frames_get32(reader->head);
        if (reader->total == 0)
            return frames_drop(reader, 0, FRAMES_HEARTBEAT);
        if (reader->total >= FRAMES_MOST)
            return frames_drop(reader, UINT32_MAX, FRAMES_BROKEN);
        if (reader->total < 4)
            return frames_drop(reader, reader->total, FRAMES_INVALID);
        if (reader->total - 4 > reader->room)
            return frames_drop(reader, reader->total, FRAMES_TOO_LARGE);
    } else if (reader->have == FRAMES_HEAD) {
        reader->json = frames_get32(reader->head + 4);
        if (reader->json == 0 || reader->json > reader->total - 4)
            return frames_drop(reader, reader->total - 4, FRAMES_INVALID);
        reader->tensors = reader->total - 4 - reader->json;
    }
    return FRAMES_MORE;
}

/* Read from `*data` up to the next event, and move `*data` and `*size` behind what was read. */
static inline enum frames_event frames_read(struct frames_reader *reader, const uint8_t **data, size_t *size)
{
    while (*size > 0) {
        enum frames_event event = FRAMES_MORE;
        uint32_t step = 1;
        if (reader->skip > 0) {
            step = *size < reader->skip ? (uint32_t)*size : reader->skip;
            reader->skip -= step;
        } else if (reader->have < FRAMES_HEAD) {
            event = frames_read_head(reader, **data);
        } else {
            uint32_t missing = 4 + reader->total - reader->have;
            step = *size < missing ? (uint32_t)*size : missing;
            memcpy(reader->buffer + (reader->have - FRAMES_HEAD), *data, step);
            reader->have += step;
            if (step == missing)
                event = frames_drop(reader, 0, FRAMES_FRAME);
        }
        *data += step;
        *size -= step;
        if (event != FRAMES_MORE)
            return event;
    }
    return FRAMES_MORE;
}

#endif
