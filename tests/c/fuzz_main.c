/* fuzz_main.c - replays inputs of fuzz_core.c where there is no libFuzzer: each file of each folder
 * that is named. Prints one line; a finding ends the process.
 *
 *   fuzz_replay folder..
 */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *byte, size_t size);

/* 0, or -1 where the file cannot be read. */
static int replay(const char *path) {
  enum {
    MOST = 1 << 16
  };
  static uint8_t buffer[MOST];
  FILE *file = fopen(path, "rb");
  if (!file) return -1;
  const size_t size = fread(buffer, 1, MOST, file);
  uint8_t *exact = (uint8_t *)malloc(size ? size : 1); /* so that reads beyond it are seen */
  fclose(file);
  if (!exact) return -1;
  for (size_t i = 0; i < size; ++i) exact[i] = buffer[i];
  LLVMFuzzerTestOneInput(exact, size);
  free(exact);
  return 0;
}

int main(int argc, char **argv) {
  int count = 0;
  for (int i = 1; i < argc; ++i) {
    DIR *folder = opendir(argv[i]);
    const struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
      char path[4096];
      if (entry->d_name[0] == '.') continue;
      snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
      fprintf(stderr, "%s\n", path); /* the last one is the culprit */
      if (replay(path) == 0) count++;
    }
    if (folder) closedir(folder);
  }
  printf("fuzz_replay: %d inputs, no finding\n", count);
  return count == 0;
}
