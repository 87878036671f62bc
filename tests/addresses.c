// Preloaded by tests/test_addresses.py: writes the names that a process looks up, and the addresses that it connects to.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>

static void note(const char *address) {
  const char *path = getenv("ADDRESSES");
  FILE *log = path && address ? fopen(path, "a") : NULL;
  if (log) {
    fprintf(log, "%s\n", address);
    fclose(log);
  }
}

int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  int (*libc)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT, "getaddrinfo");
  note(name);
  return libc(name, service, hints, found);
}

struct hostent *gethostbyname(const char *name) {
  struct hostent *(*libc)(const char *) = dlsym(RTLD_NEXT, "gethostbyname");
  note(name);
  return libc(name);
}

int connect(int socket, const struct sockaddr *to, socklen_t length) {
  int (*libc)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
  char text[INET6_ADDRSTRLEN];
  const struct sockaddr_in *four = (const void *)to;
  const struct sockaddr_in6 *six = (const void *)to;
  // HAProxy opens a socket to each name server when it starts, and sends nothing on it.
  if (to->sa_family == AF_INET && ntohs(four->sin_port) != 53)
    note(inet_ntop(AF_INET, &four->sin_addr, text, sizeof text));
  if (to->sa_family == AF_INET6 && ntohs(six->sin6_port) != 53)
    note(inet_ntop(AF_INET6, &six->sin6_addr, text, sizeof text));
  return libc(socket, to, length);
}
