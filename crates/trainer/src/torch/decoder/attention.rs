//! Causal attention within each text.

use std::collections::BTreeMap;

use baton_language::decoder::SCORES_AT_ONCE;
use tch::{Device, Kind, Tensor};

use super::capped::capped_attention;

/// Settings of a layer's attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attention {
    /// Factor of scores.
    pub(super) scale: f64,
    /// Cap of scores.
    pub(super) cap: Option<f64>,
    /// Number of the newest tokens that a token attends to.
    pub(super) window: Option<u64>,
    /// Query heads per key and value head.
    pub(super) groups: i64,
}

/// The texts of a micro-batch in blocks of similar lengths, with rows of zeros after the shorter ones: one call computes a
/// block. On a GPU a call for each text is bound by the launches of its kernels.
#[derive(Debug)]
pub(super) struct PaddedTexts {
    blocks: Vec<PaddedBlock>,
    /// Rows of all blocks.
    len: i64,
    /// The row of each token (T) in the blocks. No two are equal, so sums over them have one term.
    rows: Tensor,
}

#[derive(Debug)]
struct PaddedBlock {
    texts: i64,
    /// Rows of each text.
    length: i64,
}

impl PaddedTexts {
    /// A block for each power of two to which lengths are rounded up, so less than half of the rows are zeros. A text's
    /// place depends on the texts of the micro-batch alone. Waits for the device, to copy the rows.
    pub(super) fn new(lengths: &[i64], device: Device) -> tch::Result<Self> {
        let mut members: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (text, length) in lengths.iter().enumerate() {
            members.entry(length.unsigned_abs().next_power_of_two()).or_default().push(text);
        }
        let (mut blocks, mut len, mut first_rows) = (Vec::new(), 0, vec![0; lengths.len()]);
        for texts in members.into_values() {
            let length = texts.iter().map(|text| lengths[*text]).max().unwrap_or_default();
            blocks.push(PaddedBlock { texts: texts.len() as i64, length });
            for text in texts {
                first_rows[text] = len;
                len += length;
            }
        }
        let texts = first_rows.into_iter().zip(lengths);
        let rows: Vec<i64> = texts.flat_map(|(first, length)| first..first + length).collect();
        let rows = Tensor::f_from_slice(&rows)?.f_to_device(device)?;
        Ok(Self { blocks, len, rows })
    }

    /// (T, H, D) → a tensor (texts, H, length, D) of each block
    fn pad(&self, x: &Tensor) -> tch::Result<Vec<Tensor>> {
        let [_, heads, values] = x.size3().map(<[i64; 3]>::from)?;
        let padded = x.f_new_zeros([self.len, heads, values], (x.kind(), x.device()))?;
        let padded = padded.f_index_copy(0, &self.rows, x)?;
        let mut start = 0;
        let block = |PaddedBlock { texts, length }: &PaddedBlock| {
            let rows = padded.f_narrow(0, start, texts * length)?;
            start += texts * length;
            rows.f_view([*texts, *length, heads, values])?.f_transpose(1, 2)
        };
        self.blocks.iter().map(block).collect()
    }

    /// The inverse of [`pad`](Self::pad): (T, H·D).
    fn unpad(&self, blocks: &[Tensor]) -> tch::Result<Tensor> {
        let rows = blocks.iter().map(|block| {
            let [_, heads, _, values] = block.size4().map(<[i64; 4]>::from)?;
            block.f_transpose(1, 2)?.f_reshape([-1, heads * values])
        });
        let rows = Tensor::f_cat(&rows.collect::<tch::Result<Vec<_>>>()?, 0)?;
        rows.f_index_select(0, &self.rows)
    }
}

impl Attention {
    /// Outputs (T, H·D) for queries (T, H, D), and keys and values (T, K, D), of padded texts.
    pub(super) fn of_padded_texts(
        &self,
        inputs: [&Tensor; 3],
        texts: &PaddedTexts,
    ) -> tch::Result<Tensor> {
        let [queries, keys, values] = inputs.map(|x| texts.pad(x));
        let blocks = queries?.into_iter().zip(keys?).zip(values?);
        // A token sees none of the zeros, as they come after it.
        let outputs = blocks.map(|((queries, keys), values)| {
            self.of_text(&queries, &self.repeated(&keys)?, &self.repeated(&values)?)
        });
        texts.unpad(&outputs.collect::<tch::Result<Vec<_>>>()?)
    }

    /// Outputs (T, H·D) for queries (T, H, D), and keys and values (T, K, D) of texts of these lengths. With a cache, they
    /// are the last tokens of longer texts: `earlier` adds those before to the keys and values of a text, given by number.
    pub(super) fn of_texts(
        &self,
        inputs: [&Tensor; 3],
        lengths: &[i64],
        earlier: &dyn Fn(usize, [Tensor; 2]) -> tch::Result<[Tensor; 2]>,
    ) -> tch::Result<Tensor> {
        let mut start = 0;
        let texts = lengths.iter().enumerate().map(|(number, length)| {
            // (1, heads, L, D)
            let text =
                |x: &Tensor| x.f_narrow(0, start, *length)?.f_transpose(0, 1)?.f_unsqueeze(0);
            let [queries, keys, values] = inputs.map(text);
            start += length;
            let [keys, values] = earlier(number, [keys?, values?])?.map(|x| self.repeated(&x));
            let attended = self.of_text(&queries?, &keys?, &values?)?;
            attended.f_squeeze_dim(0)?.f_transpose(0, 1)?.f_reshape([*length, -1])
        });
        Tensor::f_cat(&texts.collect::<tch::Result<Vec<_>>>()?, 0)
    }

    /// Keys or values, once for each query head.
    fn repeated(&self, x: &Tensor) -> tch::Result<Tensor> {
        match self.groups {
            1 => Ok(x.shallow_clone()),
            groups => x.f_repeat_interleave_self_int(groups, 1, None),
        }
    }

    fn of_text(&self, queries: &Tensor, keys: &Tensor, values: &Tensor) -> tch::Result<Tensor> {
        // The queries are those of the last tokens.
        let [count, length] = [queries, keys].map(|x| x.size().get(2).copied().unwrap_or_default());
        let window = self.window.and_then(|window| i64::try_from(window).ok());
        let window = window.filter(|window| *window < length);
        let Some(cap) = self.cap else {
            // A single last token attends to all.
            let needs_mask = window.is_some() || count < length && count > 1;
            let mask = needs_mask.then(|| visible([count, length], window, queries)).transpose()?;
            let (is_causal, scale) = (mask.is_none() && count == length, Some(self.scale));
            return Tensor::f_scaled_dot_product_attention(
                queries,
                keys,
                values,
                mask.as_ref(),
                0.0,
                is_causal,
                scale,
                false,
            );
        };
        let hidden = visible([count, length], window, queries)?.f_logical_not()?;
        let heads = SCORES_AT_ONCE as i64 / (count * length).max(1);
        self.capped([queries, keys, values], &hidden, cap, heads.max(1))
    }

    /// With capped scores, of so many heads at a time; those of all texts count.
    fn capped(
        &self,
        inputs: [&Tensor; 3],
        hidden: &Tensor,
        cap: f64,
        heads: i64,
    ) -> tch::Result<Tensor> {
        let shape = inputs[0].size();
        let [queries, keys, values] = inputs.map(|x| x.f_flatten(0, 1)?.f_split(heads, 0));
        let some = queries?.into_iter().zip(keys?).zip(values?);
        let outputs = some.map(|((queries, keys), values)| {
            capped_attention([&queries, &keys, &values], hidden, self.scale, cap)
        });
        let mut outputs = outputs.collect::<tch::Result<Vec<_>>>()?;
        let output = match outputs.len() {
            1 => outputs.remove(0),
            _ => Tensor::f_cat(&outputs, 0)?,
        };
        output.f_view(&*shape)
    }
}

/// Which tokens each of the last tokens attends to, bool, (count, length).
fn visible([count, length]: [i64; 2], window: Option<i64>, like: &Tensor) -> tch::Result<Tensor> {
    let ones = Tensor::f_ones([count, length], (Kind::Bool, like.device()))?;
    let before = length - count;
    let causal = ones.f_tril(before)?;
    match window {
        None => Ok(causal),
        Some(window) => causal.f_logical_and(&ones.f_triu(before + 1 - window)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Outputs and gradients of queries, keys and values.
    fn with_gradients(
        inputs: &[Tensor; 3],
        attend: &dyn Fn([&Tensor; 3]) -> Tensor,
    ) -> (Tensor, Vec<Tensor>) {
        let inputs = inputs.each_ref().map(|x| x.copy().set_requires_grad(true));
        let outputs = attend(inputs.each_ref());
        let weights = Tensor::arange(outputs.numel() as i64, (Kind::Float, Device::Cpu)).sin();
        let sum = (&outputs * weights.view_as(&outputs)).sum(Kind::Float);
        (outputs.detach(), Tensor::run_backward(&[&sum], &inputs.each_ref(), false, false))
    }

    #[test]
    fn padded_texts_get_the_outputs_and_gradients_of_texts_alone() {
        tch::manual_seed(5);
        let lengths = [7, 1, 12, 8, 3, 30, 5];
        let tokens = lengths.iter().sum();
        let random = |heads: i64| Tensor::randn([tokens, heads, 8], (Kind::Float, Device::Cpu));
        let inputs = [random(4), random(2), random(2)];
        let texts = PaddedTexts::new(&lengths, Device::Cpu).unwrap();
        assert_eq!(texts.blocks.len(), 5, "1, 2 to 4, 5 to 8, 9 to 16, 17 to 32");
        for (cap, window) in
            [(None, None), (None, Some(5)), (Some(2.0), None), (Some(2.0), Some(5))]
        {
            let attention = Attention { scale: 0.3, cap, window, groups: 2 };
            let alone = |_, new: [Tensor; 2]| Ok(new);
            let (expected, expected_gradients) = with_gradients(&inputs, &|inputs| {
                attention.of_texts(inputs, &lengths, &alone).unwrap()
            });
            let (found, gradients) = with_gradients(&inputs, &|inputs| {
                attention.of_padded_texts(inputs, &texts).unwrap()
            });
            let pairs = gradients.iter().zip(&expected_gradients).chain([(&found, &expected)]);
            for (found, expected) in pairs {
                let distance = f64::try_from((found - expected).abs().max()).unwrap();
                assert!(distance < 1e-5, "cap {cap:?}, window {window:?}: {distance}");
            }
        }
    }

    #[test]
    fn capped_scores_of_some_heads_at_a_time_give_the_same_bits() {
        tch::manual_seed(6);
        let inputs: [Tensor; 3] =
            std::array::from_fn(|_| Tensor::randn([5, 2, 9, 8], (Kind::Float, Device::Cpu)));
        let attention = Attention { scale: 0.3, cap: Some(2.0), window: None, groups: 1 };
        let hidden = visible([9, 9], Some(4), &inputs[0]).unwrap().logical_not();
        let at_once = |heads| {
            with_gradients(&inputs, &|inputs| {
                attention.capped(inputs, &hidden, 2.0, heads).unwrap()
            })
        };
        let all = at_once(10);
        // As autograd computes it, which keeps the scores.
        let kept = with_gradients(&inputs, &|[queries, keys, values]| {
            let scores = (queries.matmul(&keys.transpose(2, 3)) * 0.3 / 2.0).tanh() * 2.0;
            let scores = scores.masked_fill(&hidden, f64::NEG_INFINITY);
            scores.softmax(-1, Kind::Float).matmul(values)
        });
        for some in [at_once(1), at_once(3), kept] {
            assert_eq!(some, all);
        }
    }
}
