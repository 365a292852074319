/* Byte-level BPE: words of a text into ids. In every word the pair of the lowest rank is joined, the first of equals
   first, until no pair is left that has a rank. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX
#define FEW 40      /* symbols in which looking at all pairs is faster than a heap */
#define SHORT 15    /* bytes of a word that is kept */
#define KEPT_IDS 7  /* its ids */

/* A table of 1 << bits slots; those without a pair have no rank. */
typedef struct { uint64_t pair; uint32_t rank, id; } Merge;
typedef struct { const Merge *slots; uint64_t bits; } Table;
typedef struct { uint32_t id, rank, before, after; } Symbol;  /* the rank is that of the pair with the one after it */
typedef struct { uint64_t word[2]; uint32_t count, ids[KEPT_IDS]; } Known;

static uint64_t hash(uint64_t key, uint64_t bits) { return key * 0x9E3779B97F4A7C15u >> (64 - bits); }

static const Merge *find(Table table, uint32_t left, uint32_t right) {
    uint64_t pair = (uint64_t)left << 32 | right, slot = hash(pair, table.bits);
    while (table.slots[slot].rank != NONE && table.slots[slot].pair != pair) slot = (slot + 1) & ((1ull << table.bits) - 1);
    return &table.slots[slot];
}

/* Enter pairs of ids, the lowest rank first, with the ids that they become. */
void enter(Merge *slots, uint64_t bits, const uint32_t *pairs, const uint32_t *ids, uint32_t count) {
    Table table = {slots, bits};
    memset(slots, 0xFF, sizeof(Merge) << bits);
    for (uint32_t rank = 0; rank < count; rank++) {
        uint32_t left = pairs[2 * rank], right = pairs[2 * rank + 1];
        *(Merge *)find(table, left, right) = (Merge){(uint64_t)left << 32 | right, rank, ids[rank]};
    }
}

static uint32_t rank_of(Table table, uint32_t left, uint32_t right) { return find(table, left, right)->rank; }

/* Join within a few symbols, which stay side by side; return how many are left. */
static size_t join_few(Table table, uint32_t *ids, size_t count) {
    uint32_t ranks[FEW];
    for (size_t i = 0; i + 1 < count; i++) ranks[i] = rank_of(table, ids[i], ids[i + 1]);
    while (count > 1) {
        uint32_t least = NONE;
        size_t best = 0;
        for (size_t i = 0; i + 1 < count; i++)
            if (ranks[i] < least) least = ranks[i], best = i;
        if (least == NONE) break;
        ids[best] = find(table, ids[best], ids[best + 1])->id;
        count--;
        memmove(ids + best + 1, ids + best + 2, (count - best - 1) * sizeof *ids);
        memmove(ranks + best + 1, ranks + best + 2, (count - best - 1) * sizeof *ranks);
        if (best) ranks[best - 1] = rank_of(table, ids[best - 1], ids[best]);
        if (best + 1 < count) ranks[best] = rank_of(table, ids[best], ids[best + 1]);
    }
    return count;
}

static size_t push(uint64_t *heap, size_t size, uint64_t entry) {
    size_t place = size;
    for (; place && heap[(place - 1) / 2] > entry; place = (place - 1) / 2) heap[place] = heap[(place - 1) / 2];
    heap[place] = entry;
    return size + 1;
}

/* Take the least entry, heap[0], away. */
static size_t pop(uint64_t *heap, size_t size) {
    uint64_t last = heap[--size];
    size_t place = 0, child;
    while ((child = 2 * place + 1) < size) {
        child += child + 1 < size && heap[child + 1] < heap[child];
        if (heap[child] >= last) break;
        heap[place] = heap[child];
        place = child;
    }
    heap[place] = last;
    return size;
}

/* Join within many symbols; entries of the heap are a rank and a place, stale ones where the rank is another now. */
static size_t join_many(Table table, uint32_t *ids, size_t count, Symbol *symbols, uint64_t *heap) {
    size_t size = 0, left = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t rank = i + 1 < count ? rank_of(table, ids[i], ids[i + 1]) : NONE;
        symbols[i] = (Symbol){ids[i], rank, i - 1, i + 1};
        if (rank != NONE) size = push(heap, size, (uint64_t)rank << 32 | i);
    }
    while (size) {
        uint32_t rank = heap[0] >> 32, place = (uint32_t)heap[0];
        Symbol *symbol = symbols + place;
        size = pop(heap, size);
        if (symbol->rank != rank) continue;
        Symbol *next = symbols + symbol->after;
        symbol->id = find(table, symbol->id, next->id)->id;
        symbol->after = next->after;
        symbol->rank = next->rank = NONE;
        if (symbol->after < count) {
            Symbol *after = symbols + symbol->after;
            after->before = place;
            symbol->rank = rank_of(table, symbol->id, after->id);
            if (symbol->rank != NONE) size = push(heap, size, (uint64_t)symbol->rank << 32 | place);
        }
        if (place) {
            Symbol *before = symbols + symbol->before;
            before->rank = rank_of(table, before->id, symbol->id);
            if (before->rank != NONE) size = push(heap, size, (uint64_t)before->rank << 32 | symbol->before);
        }
    }
    for (size_t i = 0; i < count; i = symbols[i].after) ids[left++] = symbols[i].id;
    return left;
}

/* Join within the bytes of a word, whatever their number; return how many ids are left, or NONE where memory is short. */
static uint32_t join(Table table, uint32_t *ids, size_t count) {
    if (count <= FEW) return join_few(table, ids, count);
    Symbol *symbols = malloc(count * (sizeof(Symbol) + 3 * sizeof(uint64_t)));
    if (!symbols) return NONE;
    count = join_many(table, ids, count, symbols, (uint64_t *)(symbols + count));
    free(symbols);
    return count;
}

static size_t bytes_of(const uint8_t *text, size_t characters) {
    size_t end = 0;
    for (; characters; characters--)
        for (end++; (text[end] & 0xC0) == 0x80; end++) {}
    return end;
}

/* Write the ids of a text in UTF-8, which a 0 ends, and return how many they are, or -1 where memory is short.

   The text is cut into words of so many characters. `bytes` are the ids of the 256 bytes; `known` has 1 << known_bits
   places for words seen before, all zeros at first. Behind the last id KEPT_IDS more may be written. */
int64_t encode(const Merge *slots, uint64_t bits, const uint32_t *bytes, Known *known, uint64_t known_bits,
               const uint8_t *text, const uint32_t *lengths, uint64_t words, uint32_t *ids) {
    uint32_t *start = ids;
    for (const uint32_t *length = lengths; length < lengths + words; length++) {
        size_t size = bytes_of(text, *length);
        Known new = {{0}}, *place = &new;
        if (size <= SHORT) {
            memcpy(new.word, text, size);
            ((uint8_t *)new.word)[SHORT] = size;
            place = known + hash(new.word[0] ^ hash(new.word[1], 64), known_bits);
        }
        if (size <= SHORT && place->word[0] == new.word[0] && place->word[1] == new.word[1]) {
            memcpy(ids, place->ids, sizeof place->ids);
            new.count = place->count;
        } else {
            for (size_t i = 0; i < size; i++) ids[i] = bytes[text[i]];
            new.count = join((Table){slots, bits}, ids, size);
            if (new.count == NONE) return -1;
            if (new.count <= KEPT_IDS) {
                memcpy(new.ids, ids, new.count * sizeof *ids);
                *place = new;
            }
        }
        ids += new.count;
        text += size;
    }
    return ids - start;
}
