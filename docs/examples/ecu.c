/* Asks a model over a plain socket, as a microcontroller would: no HTTP library, no JSON library, no heap, 2 KiB.
 *
 *     cc -std=c99 -o ecu ecu.c
 *     ./ecu infer 127.0.0.1 8080 m 10      ten requests on one connection
 *     ./ecu stream 127.0.0.1 8080 m 10     ten records of one stream, as frames
 *
 * The model adds two numbers: x FP32[1,2] to y FP32[1,1]. Prints a line for each request: its number and y, or its number
 * and why there is none. A connection that is lost is made anew, and what had no answer on it is asked again.
 */
#define _POSIX_C_SOURCE 200809L
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "frames.h"

enum {
    INPUT_BYTES = 1024,  /* what a socket gave and nobody looked at yet */
    RECORD_BYTES = 1024, /* a request on its way out, then the JSON and the tensors of its answer */
    LINE_BYTES = 160,    /* of a header line more is not looked at */
    TIMEOUT_MS = 2000,   /* longer than the agent may take: see Request-Timeout-Ms below */
    TRIES = 6
};

static uint8_t input[INPUT_BYTES], record[RECORD_BYTES];

enum outcome {
    ANSWERED,
    SKIPPED, /* this one has no answer, and asking again does not help: the deadline, a fault */
    LATER,   /* busy, stopping, loading: ask again after a while */
    LOST,    /* the connection: make another */
    WRONG    /* what we send is wrong; mend the program */
};

struct link {
    const char *host, *port, *model;
    int fd;         /* -1: there is none */
    size_t at, end; /* of input */
    int streaming;  /* a stream is open on it */
    /* The answer whose head was read last. */
    int status, chunked, close;
    long left;      /* bytes of the body, or of its chunk */
    long json;      /* bytes of the body that are JSON; -1: all */
    int wait_s;     /* Retry-After */
};

static const char infer_json[] =
    "{\"inputs\":[{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1,2],\"parameters\":{\"binary_data_size\":8}}],"
    "\"outputs\":[{\"name\":\"y\",\"parameters\":{\"binary_data\":true}}]}";
static const char record_json[] = /* of frames outputs are binary anyway, and equal text is checked once */
    "{\"inputs\":[{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1,2],\"parameters\":{\"binary_data_size\":8}}]}";

static void put_float(uint8_t *at, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    frames_put32(at, bits);
}

static float get_float(const uint8_t *at)
{
    uint32_t bits = frames_get32(at);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* --- the connection */

static void disconnect(struct link *link)
{
    if (link->fd >= 0)
        close(link->fd);
    link->fd = -1;
    link->streaming = 0;
}

static int connect_to(struct link *link)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(link->port))};
    struct timeval patience = {.tv_sec = TIMEOUT_MS / 1000, .tv_usec = TIMEOUT_MS % 1000 * 1000};
    int on = 1;

    if (inet_pton(AF_INET, link->host, &to.sin_addr) != 1 || (link->fd = socket(AF_INET, SOCK_STREAM, 0)) < 0)
        return 0;
    setsockopt(link->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(link->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (connect(link->fd, (struct sockaddr *)&to, sizeof to) != 0)
        disconnect(link);
    link->at = link->end = 0;
    return link->fd >= 0;
}

static int send_all(struct link *link, const uint8_t *data, size_t size)
{
    while (size > 0) {
        ssize_t sent = send(link->fd, data, size, MSG_NOSIGNAL);
        if (sent <= 0)
            return 0;
        data += sent;
        size -= (size_t)sent;
    }
    return 1;
}

/* The next byte; -1 at the end, after an error, and after too long a silence. */
static int next_byte(struct link *link)
{
    if (link->at == link->end) {
        ssize_t received = recv(link->fd, input, sizeof input, 0);
        if (received <= 0)
            return -1;
        link->at = 0;
        link->end = (size_t)received;
    }
    return input[link->at++];
}

/* The next line without its end, cut to what there is room for; 0 if there is none. */
static int next_line(struct link *link, char line[LINE_BYTES])
{
    size_t size = 0;
    int byte;

    while ((byte = next_byte(link)) != '\n') {
        if (byte < 0)
            return 0;
        if (byte != '\r' && size < LINE_BYTES - 1)
            line[size++] = (char)byte;
    }
    line[size] = '\0';
    return 1;
}

/* --- answers */

static const char *value_of(const char *line, const char *name)
{
    size_t size = strlen(name);
    if (strncasecmp(line, name, size) != 0 || line[size] != ':')
        return NULL;
    return line + size + 1 + strspn(line + size + 1, " \t");
}

static int read_head(struct link *link)
{
    char line[LINE_BYTES];
    const char *value;

    do { /* 100 Continue and its like come before the answer */
        if (!next_line(link, line) || strncmp(line, "HTTP/1.", 7) != 0)
            return 0;
        link->status = atoi(line + strlen("HTTP/1.1 "));
        link->chunked = 0;
        link->close = strncmp(line, "HTTP/1.0", 8) == 0;
        link->left = link->wait_s = 0;
        link->json = -1;
        while (next_line(link, line) && line[0] != '\0') {
            if ((value = value_of(line, "Content-Length")) != NULL)
                link->left = strtol(value, NULL, 10);
            else if ((value = value_of(line, "Inference-Header-Content-Length")) != NULL)
                link->json = strtol(value, NULL, 10);
            else if ((value = value_of(line, "Retry-After")) != NULL)
                link->wait_s = atoi(value);
            else if ((value = value_of(line, "Connection")) != NULL)
                link->close = strcasecmp(value, "close") == 0;
            else if ((value = value_of(line, "Transfer-Encoding")) != NULL)
                link->chunked = 1;
        }
        if (line[0] != '\0')
            return 0;
    } while (link->status / 100 == 1);
    return 1;
}

/* The next byte of the body; -1 at its end, or that of the connection. */
static int body_byte(struct link *link)
{
    char line[LINE_BYTES];

    if (link->left == 0) {
        if (!link->chunked || !next_line(link, line))
            return -1;
        link->left = strtol(line, NULL, 16);
        if (link->left <= 0) {
            while (next_line(link, line) && line[0] != '\0')
                ; /* trailers */
            link->chunked = 0;
            return -1;
        }
    }
    int byte = next_byte(link);
    if (--link->left == 0 && link->chunked)
        next_line(link, line);
    return byte;
}

/* What to do about an answer, by its status: docs/reasons.md. */
static enum outcome judge(int status)
{
    switch (status) {
    case 200:
        return ANSWERED;
    case 429:
    case 503:
        return LATER;
    case 408:
    case 499:
        return LOST;
    case 500:
    case 504:
        return SKIPPED;
    default:
        return WRONG;
    }
}

/* --- one request */

static enum outcome infer(struct link *link, const float x[2], float *y)
{
    const size_t json = sizeof infer_json - 1;
    size_t size = 0;
    long at;
    int byte = 0;

    /* The same bytes every time but for the tensor. Request-Timeout-Ms: then the answer is of no use any more. */
    int head = snprintf((char *)record, sizeof record,
        "POST /v2/models/%s/infer HTTP/1.1\r\nHost: agent\r\nRequest-Timeout-Ms: 1000\r\n"
        "Inference-Header-Content-Length: %zu\r\nContent-Length: %zu\r\n\r\n%s",
        link->model, json, json + 8, infer_json);
    put_float(record + head, x[0]);
    put_float(record + head + 4, x[1]);
    if (!send_all(link, record, (size_t)head + 8) || !read_head(link))
        return LOST;

    for (at = 0; link->left > 0 && (byte = body_byte(link)) >= 0; at++)
        if ((link->json < 0 || at >= link->json) && size < sizeof record - 1)
            record[size++] = (uint8_t)byte; /* the tensor, or the whole of an error */
    if (byte < 0)
        return LOST;
    record[size] = '\0';
    enum outcome outcome = judge(link->status);
    if (outcome == ANSWERED && size == 4)
        *y = get_float(record);
    else if (outcome != ANSWERED)
        fprintf(stderr, "%d %s\n", link->status, (char *)record);
    if (link->close)
        disconnect(link);
    return outcome;
}

/* --- one record of a stream */

static int send_chunk(struct link *link, const uint8_t *data, size_t size)
{
    char line[16];
    int head = snprintf(line, sizeof line, "%zx\r\n", size);
    return send_all(link, (uint8_t *)line, (size_t)head) && send_all(link, data, size) &&
           send_all(link, (const uint8_t *)"\r\n", 2);
}

static enum outcome open_stream(struct link *link)
{
    int size = snprintf((char *)record, sizeof record,
        "POST /v2/models/%s/stream HTTP/1.1\r\nHost: agent\r\nContent-Type: application/vnd.tightfit.frames\r\n"
        "Transfer-Encoding: chunked\r\nRequest-Timeout-Ms: 1000\r\n\r\n",
        link->model);
    if (!send_all(link, record, (size_t)size) || !read_head(link))
        return LOST;
    enum outcome outcome = judge(link->status);
    link->streaming = outcome == ANSWERED;
    if (outcome != ANSWERED) {
        fprintf(stderr, "%d\n", link->status);
        disconnect(link);
    }
    return outcome;
}

static enum outcome stream(struct link *link, const float x[2], float *y)
{
    const uint32_t json = sizeof record_json - 1;
    struct frames_reader reader;
    enum frames_event event;
    enum outcome outcome;
    int value;

    if (!link->streaming && (outcome = open_stream(link)) != ANSWERED)
        return outcome;
    frames_head(record, json, 8);
    memcpy(record + FRAMES_HEAD, record_json, json);
    put_float(record + FRAMES_HEAD + json, x[0]);
    put_float(record + FRAMES_HEAD + json + 4, x[1]);
    if (!send_chunk(link, record, FRAMES_HEAD + json + 8))
        return LOST;

    frames_begin(&reader, record, sizeof record - 1);
    do { /* heartbeats are passed over */
        if ((value = body_byte(link)) < 0)
            return LOST;
        uint8_t byte = (uint8_t)value;
        const uint8_t *data = &byte;
        size_t size = 1;
        event = frames_read(&reader, &data, &size);
    } while (event == FRAMES_MORE || event == FRAMES_HEARTBEAT);
    if (event != FRAMES_FRAME)
        return LOST;
    if (reader.tensors == 4) {
        *y = get_float(record + reader.json);
        return ANSWERED;
    }
    record[reader.json] = '\0';
    fprintf(stderr, "%s\n", (char *)record);
    const char *status = strstr((char *)record, "\"status\":");
    return status ? judge(atoi(status + strlen("\"status\":"))) : LOST;
}

static void wait_ms(long ms)
{
    struct timespec time = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

/* Ask until there is an answer, or no sense in asking: at once on a new connection, then ever more slowly. */
static enum outcome ask(struct link *link, int streams, const float x[2], float *y)
{
    enum outcome outcome = LOST;

    for (int attempt = 0; attempt < TRIES; attempt++) {
        if (attempt > 1)
            wait_ms(outcome == LATER && link->wait_s > 0 ? 1000L * link->wait_s : 25L << attempt);
        if (link->fd < 0 && !connect_to(link))
            continue;
        outcome = streams ? stream(link, x, y) : infer(link, x, y);
        if (outcome == LOST)
            disconnect(link);
        else if (outcome != LATER)
            return outcome;
    }
    return outcome;
}

int main(int argc, char **argv)
{
    static const char *const names[] = {"answered", "skipped", "busy", "lost", "wrong"};

    if (argc != 6) {
        fputs("ecu infer|stream IPV4 PORT MODEL COUNT\n", stderr);
        return 2;
    }
    struct link link = {.host = argv[2], .port = argv[3], .model = argv[4], .fd = -1};
    int streams = strcmp(argv[1], "stream") == 0, failed = 0;
    for (int turn = 0; turn < atoi(argv[5]); turn++) {
        const float x[2] = {(float)turn, 0.5f};
        float y = 0;
        enum outcome outcome = ask(&link, streams, x, &y);
        if (outcome == ANSWERED)
            printf("%d %g\n", turn, (double)y);
        else
            printf("%d %s\n", turn, names[outcome]);
        failed += outcome != ANSWERED;
        if (outcome == WRONG)
            break;
    }
    if (link.streaming)
        send_all(&link, (const uint8_t *)"0\r\n\r\n", 5); /* no more comes */
    disconnect(&link);
    return failed > 0;
}
