/* frames request           write a frame that asks a model for two numbers
 * frames read PIECE ROOM   read frames from stdin, PIECE bytes at a time, each of at most ROOM bytes; a line for each
 *
 *     cc -std=c99 -o frames frames.c
 *     ./frames request | ./frames read 1 1000
 */
#include <stdio.h>
#include <stdlib.h>

#include "frames.h"

static const char request[] =
    "{\"inputs\":[{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1,2],\"parameters\":{\"binary_data_size\":8}}]}";

static int write_request(void)
{
    const uint8_t tensor[8] = {0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0xc0}; /* 1.0f, -2.0f */
    uint8_t head[FRAMES_HEAD];
    size_t json = sizeof request - 1;

    frames_head(head, (uint32_t)json, sizeof tensor);
    return fwrite(head, 1, sizeof head, stdout) == sizeof head && fwrite(request, 1, json, stdout) == json &&
                   fwrite(tensor, 1, sizeof tensor, stdout) == sizeof tensor
               ? 0
               : 1;
}

static void show(enum frames_event event, const struct frames_reader *reader)
{
    static const char *const names[] = {"", "frame", "heartbeat", "too large", "invalid", "broken"};

    fputs(names[event], stdout);
    if (event == FRAMES_FRAME) {
        printf(" %.*s ", (int)reader->json, (const char *)reader->buffer);
        for (uint32_t i = 0; i < reader->tensors; i++)
            printf("%02x", reader->buffer[reader->json + i]);
    }
    putchar('\n');
}

static int read_frames(size_t piece, uint32_t room)
{
    uint8_t *input = malloc(piece), *buffer = malloc(room);
    struct frames_reader reader;
    size_t size = 0;

    if (input == NULL || buffer == NULL)
        return 1;
    frames_begin(&reader, buffer, room);
    while ((size = fread(input, 1, piece, stdin)) > 0) {
        const uint8_t *data = input;
        enum frames_event event = FRAMES_MORE;
        while ((event = frames_read(&reader, &data, &size)) != FRAMES_MORE)
            show(event, &reader);
    }
    free(input);
    free(buffer);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "request") == 0)
        return write_request();
    if (argc == 4 && strcmp(argv[1], "read") == 0)
        return read_frames((size_t)strtoul(argv[2], NULL, 10), (uint32_t)strtoul(argv[3], NULL, 10));
    fputs("frames request | frames read PIECE ROOM\n", stderr);
    return 2;
}
