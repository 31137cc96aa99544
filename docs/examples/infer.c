/* Asks a model with libcurl: x FP32[1,2] to y FP32[1,1], tensors in binary, over one connection.
 *
 *     cc -std=c99 -o infer infer.c $(pkg-config --cflags --libs libcurl)
 *     ./infer http://127.0.0.1:8080/v2/models/m/infer 1 -2 0.5      y for each pair that follows another: -1, -1.5
 *
 * Over https (docs/security.md) the environment says whom to trust and who asks, as far as that is needed:
 *
 *     TIGHTFIT_CA=ca.pem TIGHTFIT_TOKEN=... TIGHTFIT_CERT=camera.pem TIGHTFIT_KEY=camera.key
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <curl/curl.h>

static const char json[] =
    "{\"inputs\":[{\"name\":\"x\",\"datatype\":\"FP32\",\"shape\":[1,2],\"parameters\":{\"binary_data_size\":8}}],"
    "\"outputs\":[{\"name\":\"y\",\"parameters\":{\"binary_data\":true}}]}";

struct answer {
    char data[4096];
    size_t size;
    size_t json; /* so many bytes of data are JSON, then come the tensors */
};

static size_t take(char *data, size_t one, size_t size, void *user)
{
    struct answer *answer = user;
    (void)one;
    if (size >= sizeof answer->data - answer->size)
        return 0; /* ends the transfer: more than we have room for */
    memcpy(answer->data + answer->size, data, size);
    answer->size += size;
    answer->data[answer->size] = '\0';
    return size;
}

static size_t take_header(char *data, size_t one, size_t size, void *user)
{
    static const char name[] = "inference-header-content-length:";
    (void)one;
    if (size > sizeof name && curl_strnequal(data, name, sizeof name - 1))
        ((struct answer *)user)->json = strtoul(data + sizeof name - 1, NULL, 10);
    return size;
}

/* Tensors are little-endian, as this machine is taken to be. */
static int ask(CURL *curl, const float x[2])
{
    struct answer answer = {.size = 0};
    char body[sizeof json - 1 + 8];
    long status = 0;
    float y;

    memcpy(body, json, sizeof json - 1);
    memcpy(body + sizeof json - 1, x, 8);
    curl_easy_setopt(curl, CURLOPT_POSTFIELDS, body);
    curl_easy_setopt(curl, CURLOPT_POSTFIELDSIZE, (long)sizeof body);
    curl_easy_setopt(curl, CURLOPT_WRITEDATA, &answer);
    curl_easy_setopt(curl, CURLOPT_HEADERDATA, &answer);
    CURLcode code = curl_easy_perform(curl);
    if (code != CURLE_OK) {
        fprintf(stderr, "%s\n", curl_easy_strerror(code));
        return 0;
    }
    curl_easy_getinfo(curl, CURLINFO_RESPONSE_CODE, &status);
    if (status != 200 || answer.size != answer.json + sizeof y) {
        fprintf(stderr, "%ld %s\n", status, answer.data); /* {"error":"..."} */
        return 0;
    }
    memcpy(&y, answer.data + answer.json, sizeof y);
    printf("%g\n", (double)y);
    return 1;
}

static struct curl_slist *identify(CURL *curl, struct curl_slist *headers)
{
    static const struct { const char *name; CURLoption option; } files[] = {
        {"TIGHTFIT_CA", CURLOPT_CAINFO}, {"TIGHTFIT_CERT", CURLOPT_SSLCERT}, {"TIGHTFIT_KEY", CURLOPT_SSLKEY},
    };
    const char *token = getenv("TIGHTFIT_TOKEN");
    for (size_t at = 0; at < sizeof files / sizeof *files; at++)
        if (getenv(files[at].name) != NULL)
            curl_easy_setopt(curl, files[at].option, getenv(files[at].name));
    if (token != NULL) {
        char field[600];
        snprintf(field, sizeof field, "Authorization: Bearer %s", token);
        headers = curl_slist_append(headers, field);
    }
    return headers;
}

int main(int argc, char **argv)
{
    char length[64];
    struct curl_slist *headers = NULL;
    CURL *curl = curl_easy_init();
    int answered = 1;

    if (argc < 4 || curl == NULL) {
        fputs("infer URL NUMBER NUMBER...\n", stderr);
        return 2;
    }
    snprintf(length, sizeof length, "Inference-Header-Content-Length: %zu", sizeof json - 1);
    headers = curl_slist_append(headers, length);
    headers = curl_slist_append(headers, "Content-Type: application/octet-stream");
    headers = curl_slist_append(headers, "Request-Timeout-Ms: 1000");
    headers = identify(curl, headers);
    curl_easy_setopt(curl, CURLOPT_URL, argv[1]);
    curl_easy_setopt(curl, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take);
    curl_easy_setopt(curl, CURLOPT_HEADERFUNCTION, take_header);
    curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, 2000L);
    curl_easy_setopt(curl, CURLOPT_TCP_KEEPALIVE, 1L);
    for (int at = 2; answered && at + 1 < argc; at++) {
        const float x[2] = {strtof(argv[at], NULL), strtof(argv[at + 1], NULL)};
        answered = ask(curl, x);
    }
    curl_slist_free_all(headers);
    curl_easy_cleanup(curl);
    return !answered;
}
