/* One inference over a plain socket, as an ECU would do it: no HTTP library, no JSON library, no heap.
 *
 *     cc -O2 -Wall -Wextra -o ecu_client scripts/ecu_client.c
 *     ./ecu_client 8080 ocr x fetch_name_0 line.f32
 *
 * line.f32 holds float32 values (little-endian), one line of text as the model takes it: [1, 3, 48, 320].
 * Prints the HTTP status and the best class of every step of the output [1, steps, classes].
 */
#define _GNU_SOURCE /* strcasestr */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define WIDTH 320
#define INPUT_BYTES (1 * 3 * 48 * WIDTH * 4)

static char input[INPUT_BYTES];
static char answer[8 << 20]; /* 40 steps x 18710 classes x 4 bytes = 3 MB, and its headers */

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static void send_all(int fd, const char *data, size_t size)
{
    while (size) {
        ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
        if (sent <= 0)
            fail("send");
        data += sent;
        size -= (size_t)sent;
    }
}

/* The number in a header line; the names are matched without regard to case. */
static long header(const char *head, const char *name)
{
    const char *found = strcasestr(head, name);
    return found ? strtol(found + strlen(name), NULL, 10) : -1;
}

int main(int argc, char **argv)
{
    if (argc != 6) {
        fprintf(stderr, "usage: %s PORT MODEL INPUT OUTPUT FILE\n", argv[0]);
        return 2;
    }
    FILE *file = fopen(argv[5], "rb");
    if (!file || fread(input, 1, INPUT_BYTES, file) != INPUT_BYTES)
        fail(argv[5]);
    fclose(file);

    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[1]))};
    struct timeval patience = {.tv_sec = 5};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (connect(fd, (struct sockaddr *)&to, sizeof to))
        fail("connect");

    char json[512], head[512];
    int json_size = snprintf(json, sizeof json,
        "{\"inputs\":[{\"name\":\"%s\",\"datatype\":\"FP32\",\"shape\":[1,3,48,%d],"
        "\"parameters\":{\"binary_data_size\":%d}}],"
        "\"outputs\":[{\"name\":\"%s\",\"parameters\":{\"binary_data\":true}}]}",
        argv[3], WIDTH, INPUT_BYTES, argv[4]);
    int head_size = snprintf(head, sizeof head,
        "POST /v2/models/%s/infer HTTP/1.1\r\n"
        "Host: board\r\n"
        "Content-Type: application/octet-stream\r\n"
        "Inference-Header-Content-Length: %d\r\n"
        "Content-Length: %d\r\n\r\n",
        argv[2], json_size, json_size + INPUT_BYTES);
    send_all(fd, head, (size_t)head_size);
    send_all(fd, json, (size_t)json_size);
    send_all(fd, input, INPUT_BYTES);

    size_t got = 0, wanted = sizeof answer - 1;
    char *body = NULL;
    while (got < wanted) {
        ssize_t received = recv(fd, answer + got, wanted - got, 0);
        if (received <= 0)
            fail("recv");
        got += (size_t)received;
        if (!body && (body = strstr(answer, "\r\n\r\n"))) { /* the rest of `answer` is still zero */
            body += 4;
            *(body - 1) = '\0'; /* ends the headers for strcasestr */
            wanted = (size_t)(body - answer) + (size_t)header(answer, "\r\nContent-Length:");
            if (wanted >= sizeof answer) {
                fprintf(stderr, "the answer is too large\n");
                return 1;
            }
        }
    }
    close(fd);
    int status = atoi(answer + strlen("HTTP/1.1 "));
    printf("status %d\n", status);
    if (status != 200) {
        printf("%s\n", body); /* {"error": "..."}: one line that says what to do */
        return 1;
    }
    /* The body is JSON, then the raw output. Of the JSON we need only the shape. */
    long json_length = header(answer, "\r\nInference-Header-Content-Length:");
    const char *shape = strstr(body, "\"shape\":[");
    long steps, classes;
    if (!shape || sscanf(shape, "\"shape\":[1,%ld,%ld]", &steps, &classes) != 2)
        return 1;
    for (long step = 0; step < steps; step++) {
        long best = 0;
        float most = 0, score;
        for (long i = 0; i < classes; i++) {
            /* memcpy: the output follows the JSON, so it is not aligned */
            memcpy(&score, body + json_length + (step * classes + i) * 4, sizeof score);
            if (i == 0 || score > most) {
                most = score;
                best = i;
            }
        }
        printf("%ld%c", best, step + 1 < steps ? ' ' : '\n');
    }
    return 0;
}
