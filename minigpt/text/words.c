/* Byte-level BPE: a text into words, and words into ids. In every word the pair of the lowest rank is joined, the first
   of equals first, until no pair is left that has a rank. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX
#define SHORT 15    /* bytes of a word that is kept */
#define KEPT_IDS 7  /* its ids */

enum { ODD, LETTER, DIGIT, SPACE, NEWLINE, OTHER };  /* kinds of characters; a text ends like an odd one */

/* What a pattern has, its alternatives in this order, each by its number among those known, 0 where it is left out. */
typedef struct { uint8_t contraction, letters, digits, others, newline, blank; } Rules;

typedef struct { uint64_t pair; uint32_t rank, id; } Merge;  /* without a rank where a slot is empty */
typedef struct { uint64_t word[2]; uint32_t count, ids[KEPT_IDS]; } Known;
typedef struct { uint32_t id, rank, before, after; } Symbol;  /* the rank is that of the pair with the one after it */

typedef struct {
    Merge *slots;
    uint64_t slot_bits;
    const uint32_t *bytes;  /* the ids of the 256 bytes, or NONE */
    Known *known;           /* words seen before, all zeros at first */
    uint64_t known_bits;
    const uint8_t *kinds;   /* of the first so many characters of Unicode; the others are odd */
    uint64_t characters;
    Rules rules;
} Model;

static uint64_t hash(uint64_t key, uint64_t bits) { return key * 0x9E3779B97F4A7C15u >> (64 - bits); }

static Merge *find(const Model *model, uint32_t left, uint32_t right) {
    uint64_t pair = (uint64_t)left << 32 | right, last = (1ull << model->slot_bits) - 1;
    uint64_t slot = hash(pair, model->slot_bits);
    while (model->slots[slot].rank != NONE && model->slots[slot].pair != pair) slot = (slot + 1) & last;
    return &model->slots[slot];
}

/* Enter pairs of ids, the lowest rank first, with the ids that they become. */
void enter(const Model *model, const uint32_t *pairs, const uint32_t *ids, uint32_t count) {
    memset(model->slots, 0xFF, sizeof(Merge) << model->slot_bits);
    for (uint32_t rank = 0; rank < count; rank++) {
        uint32_t left = pairs[2 * rank], right = pairs[2 * rank + 1];
        *find(model, left, right) = (Merge){(uint64_t)left << 32 | right, rank, ids[rank]};
    }
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

/* Rank the pair of a symbol and the one after it, and enter it in the heap; return the size of this. */
static size_t rank(const Model *model, Symbol *symbols, uint32_t place, uint32_t count, uint64_t *heap, size_t size) {
    Symbol *symbol = symbols + place;
    symbol->rank = symbol->after < count ? find(model, symbol->id, symbols[symbol->after].id)->rank : NONE;
    return symbol->rank == NONE ? size : push(heap, size, (uint64_t)symbol->rank << 32 | place);
}

/* Join within symbols, at first one for each id; write the ids that are left and return how many they are.

   An entry of the heap, which has room for three a symbol, is a rank and a place: stale where the rank is another now. */
static uint32_t join(const Model *model, uint32_t *ids, uint32_t count, Symbol *symbols, uint64_t *heap) {
    size_t size = 0;
    for (uint32_t i = 0; i < count; i++) {
        symbols[i] = (Symbol){ids[i], NONE, i - 1, i + 1};
        if (i) size = rank(model, symbols, i - 1, count, heap, size);
    }
    while (size) {
        uint32_t rank_then = heap[0] >> 32, place = (uint32_t)heap[0];
        Symbol *symbol = symbols + place, *next = symbols + symbol->after;
        size = pop(heap, size);
        if (symbol->rank != rank_then) continue;
        symbol->id = find(model, symbol->id, next->id)->id;
        symbol->after = next->after;
        next->rank = NONE;
        if (symbol->after < count) symbols[symbol->after].before = place;
        size = rank(model, symbols, place, count, heap, size);
        if (place) size = rank(model, symbols, symbol->before, count, heap, size);
    }
    uint32_t left = 0;
    for (uint32_t i = 0; i < count; i = symbols[i].after) ids[left++] = symbols[i].id;
    return left;
}

/* Write the kind of each byte's character; return how many bytes come before an odd one or the end, a 0 behind. */
static size_t classify(const Model *model, const uint8_t *text, size_t size, uint8_t *kinds) {
    size_t place = 0;
    while (place < size) {
        uint32_t lead = text[place], length = lead < 0x80 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
        uint32_t code = length == 1 ? lead : lead & (0x7F >> length);
        for (size_t i = 1; i < length; i++) code = code << 6 | (text[place + i] & 0x3F);
        uint8_t kind = code < model->characters ? model->kinds[code] : ODD;
        if (kind == ODD) break;
        while (length--) kinds[place++] = kind;
    }
    kinds[place] = ODD;
    return place;
}

static size_t run(const uint8_t *kinds, size_t place, uint8_t kind) {
    while (kinds[place] == kind) place++;
    return place;
}

static size_t next(const uint8_t *text, size_t place) {
    do place++;
    while ((text[place] & 0xC0) == 0x80);
    return place;
}

/* Return the end of a contraction such as 's, in small letters or any, or its start where there is none. */
static size_t contraction(const uint8_t *text, size_t start, int any_case) {
    uint8_t fold = any_case ? 0x20 : 0, first, second;
    if (text[start] != '\'') return start;
    first = text[start + 1] | fold;
    if (first == 's' || first == 't' || first == 'm' || first == 'd') return start + 2;
    second = text[start + 1] ? text[start + 2] | fold : 0;
    if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') || (first == 'l' && second == 'l'))
        return start + 3;
    return start;
}

/* Return the end of the white space in which a word of it alone begins. */
static size_t blank(Rules rules, const uint8_t *text, const uint8_t *kinds, size_t start) {
    size_t end = start, line = start;
    for (; kinds[end] == SPACE || kinds[end] == NEWLINE; end++)
        if (kinds[end] == NEWLINE) line = end + 1;
    if (rules.newline && line > start) return line;
    if (kinds[end] == ODD || (rules.blank == 2 && kinds[end] == DIGIT)) return end;
    size_t last = end - 1;  /* the last space goes with what follows */
    while ((text[last] & 0xC0) == 0x80) last--;
    return last > start ? last : end;
}

/* Return the end of the word that begins at a place. */
static size_t word_end(Rules rules, const uint8_t *text, const uint8_t *kinds, size_t start) {
    size_t spaced = start + (text[start] == ' '), end = start;
    if (rules.contraction && (end = contraction(text, start, rules.contraction < 3)) > start) return end;
    size_t letters = spaced;
    if (rules.letters == 1 && (kinds[start] == SPACE || kinds[start] == OTHER)) letters = next(text, start);
    if (kinds[letters] == LETTER) return run(kinds, letters, LETTER);
    if (rules.digits == 3 && kinds[spaced] == DIGIT) return run(kinds, spaced, DIGIT);
    if (kinds[start] == DIGIT) {
        for (int count = rules.digits == 1 ? 3 : 1; count && kinds[end] == DIGIT; count--) end = next(text, end);
        return end;
    }
    if (kinds[spaced] == OTHER) {
        end = run(kinds, spaced, OTHER);
        return rules.others == 1 ? run(kinds, end, NEWLINE) : end;
    }
    return blank(rules, text, kinds, start);
}

/* Write the ids of a word and return how many they are, or NONE where a byte has none or memory is short. */
static uint32_t encode_word(const Model *model, const uint8_t *word, size_t size, uint32_t *ids) {
    Known new = {{0}}, *place = &new;
    if (size <= SHORT) {
        memcpy(new.word, word, size);
        ((uint8_t *)new.word)[SHORT] = size;
        place = model->known + hash(new.word[0] ^ hash(new.word[1], 64), model->known_bits);
        if (place->word[0] == new.word[0] && place->word[1] == new.word[1]) {
            memcpy(ids, place->ids, sizeof place->ids);
            return place->count;
        }
    }
    for (size_t i = 0; i < size; i++)
        if ((ids[i] = model->bytes[word[i]]) == NONE) return NONE;
    Symbol *symbols = malloc(size * (sizeof(Symbol) + 3 * sizeof(uint64_t)));
    if (!symbols) return NONE;
    new.count = join(model, ids, size, symbols, (uint64_t *)(symbols + size));
    free(symbols);
    if (new.count <= KEPT_IDS) {
        memcpy(new.ids, ids, new.count * sizeof *ids);
        *place = new;
    }
    return new.count;
}

/* Write the ids of a text in UTF-8, which a 0 ends, and return how many they are, or -1 where a character is odd, a byte
   has no id or memory is short. There is room for size + 1 kinds and size + KEPT_IDS ids. */
int64_t encode(const Model *model, const uint8_t *text, uint64_t size, uint8_t *kinds, uint32_t *ids) {
    uint32_t *start = ids, count;
    if (classify(model, text, size, kinds) < size) return -1;
    for (size_t place = 0, end; place < size; place = end, ids += count) {
        end = word_end(model->rules, text, kinds, place);
        count = encode_word(model, text + place, end - place, ids);
        if (count == NONE) return -1;
    }
    return ids - start;
}
