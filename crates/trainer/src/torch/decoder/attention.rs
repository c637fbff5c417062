//! Causal attention within each text.

use tch::{Kind, Tensor};

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

impl Attention {
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
        if self.cap.is_none() {
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
        }
        // libtorch's attention cannot cap scores.
        let mut scores = queries.f_matmul(&keys.f_transpose(2, 3)?)?.f_mul_scalar(self.scale)?;
        if let Some(cap) = self.cap {
            scores = scores.f_div_scalar(cap)?.f_tanh()?.f_mul_scalar(cap)?;
        }
        let hidden = visible([count, length], window, queries)?.f_logical_not()?;
        let weights =
            scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?.f_softmax(-1, Kind::Float)?;
        weights.f_to_kind(values.kind())?.f_matmul(values)
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
