/* Products of groups of 16 outputs that share their blocks of four inputs, with tiles of columns.

   The blocks of a group come in sixteens: `places` has the element of inputs of each, and `values` a tile of 16 rows for
   each sixteen, a row for each output, of 16 blocks of four signed bytes. Blocks of zeros fill up the last sixteen. */
#ifndef GROUPS_H
#define GROUPS_H

#include "four_bytes.h"

#define GROUP 16
#define SIXTEEN (GROUP * GROUP) /* elements of a tile */

/* Whether this processor multiplies tiles of bytes (AMX), and the system allows it to this process. */
int has_tiles(void);

/* sums[r][v] = the sums of output r, for `rows` outputs, those of the last group filled up, and `vectors` vectors of
   inputs. `starts`: the place of each group's first block. Every machine computes the same sums. */
void group_sums(long rows, int vectors, const int32_t *starts, const int32_t *places, int shift, const int32_t *values,
                const int32_t *inputs, int32_t *sums);

#endif
