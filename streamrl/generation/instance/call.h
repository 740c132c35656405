/* An operation on fixed memory; `layer_ops.c` runs many, one after the other. */
typedef struct Call {
    void (*function)(const struct Call *);
    void *pointers[4];
    long sizes[5];
    float number;
} Call;
