//! Sampling of text. The keys and values of earlier tokens are kept, so that each token is computed once.

use std::cell::RefCell;

use baton_data::random::{Draws, RandomPurpose};
use tch::{Device, Tensor};

use super::{DecoderNetwork, Pass};
use crate::{
    learner::Error,
    sampling::{Prompt, Sampling},
    torch::{failure::During, network::NetworkState},
};

/// Keys and values of the tokens so far: of each layer, for each text, shape (1, K, L, D).
#[derive(Debug, Default)]
pub(super) struct KvCache(Vec<RefCell<Vec<[Tensor; 2]>>>);

impl KvCache {
    fn new(layers: usize) -> Self {
        Self((0..layers).map(|_| RefCell::default()).collect())
    }

    /// Adds keys and values of the next tokens of a text (1, K, l, D). Returns all of the text.
    pub(super) fn add(
        &self,
        layer: usize,
        text: usize,
        new: [Tensor; 2],
    ) -> tch::Result<[Tensor; 2]> {
        let mut texts = self.0[layer].borrow_mut();
        let [keys, values] = new;
        let all = match texts.get(text) {
            None => [keys, values],
            Some([before, values_before]) => {
                [Tensor::f_cat(&[before, &keys], 2)?, Tensor::f_cat(&[values_before, &values], 2)?]
            }
        };
        let copy = all.each_ref().map(Tensor::shallow_clone);
        match texts.get_mut(text) {
            None => texts.push(copy),
            Some(stored) => *stored = copy,
        }
        Ok(all)
    }

    /// Drops the texts that are not `kept`.
    fn retain(&self, kept: &[bool]) {
        for texts in &self.0 {
            let mut kept = kept.iter();
            texts.borrow_mut().retain(|_| kept.next().copied().unwrap_or_default());
        }
    }
}

/// A text that is not complete.
struct OpenText {
    /// Position of its prompt.
    position: usize,
    /// Number of its tokens whose keys and values are known.
    known: i64,
    /// The tokens after them.
    next: Vec<i64>,
    generated: u32,
    random: Draws,
}

impl DecoderNetwork {
    /// Continues each prompt, all of them together. `on_token` gets the position of a prompt and its next token;
    /// generation ends early when it returns false. Returns false if a score is not finite; all texts end there.
    pub(super) fn generated(
        &self,
        prompts: &[Prompt],
        state: NetworkState<'_>,
        sampling: &Sampling,
        on_token: &mut dyn FnMut(usize, i64) -> bool,
    ) -> Result<bool, Error> {
        let _no_grad = tch::no_grad_guard();
        let cache = KvCache::new(self.layers.len());
        let open = prompts.iter().enumerate().map(|(position, prompt)| OpenText {
            position,
            known: 0,
            next: prompt.tokens.clone(),
            generated: 0,
            random: Draws::new(sampling.seed, 0, prompt.number, RandomPurpose::Generate),
        });
        let mut texts: Vec<OpenText> = open.filter(|text| !text.next.is_empty()).collect();
        while !texts.is_empty() {
            let scores = self.next_scores(&texts, state, &cache).during("generate text")?;
            let mut kept = Vec::with_capacity(texts.len());
            for (text, scores) in texts.iter_mut().zip(scores) {
                let token = sampling.choose(&scores, &mut text.random);
                if !scores.get(token).is_some_and(|score| score.is_finite()) {
                    return Ok(false);
                }
                let token = token as i64;
                text.known += text.next.len() as i64;
                text.next = vec![token];
                text.generated += 1;
                if !on_token(text.position, token) {
                    return Ok(true);
                }
                let is_full = text.known as u64 >= self.decoder.max_positions;
                let is_last = text.generated >= sampling.max_tokens || is_full;
                kept.push(!is_last && !sampling.stops.contains(&token));
            }
            cache.retain(&kept);
            let mut kept = kept.into_iter();
            texts.retain(|_| kept.next().unwrap_or_default());
        }
        Ok(true)
    }

    /// The scores of all tokens after the last token of each text.
    fn next_scores(
        &self,
        texts: &[OpenText],
        state: NetworkState<'_>,
        cache: &KvCache,
    ) -> tch::Result<Vec<Vec<f32>>> {
        let tokens: Vec<i64> = texts.iter().flat_map(|text| text.next.iter().copied()).collect();
        let tokens = Tensor::f_from_slice(&tokens)?.f_to_device(self.device)?;
        let lengths: Vec<i64> = texts.iter().map(|text| text.next.len() as i64).collect();
        let starts: Vec<i64> = texts.iter().map(|text| text.known).collect();
        let pass = Pass {
            tokens: &tokens,
            lengths: &lengths,
            padded: None,
            ropes: self.ropes(&lengths, Some(&starts))?,
            state,
            dropout: None,
            cache: Some(cache),
        };
        let x = self.run(0..self.parts.len(), &tokens, &pass)?;
        let ends = lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end - 1)
        });
        let ends = Tensor::f_from_slice(&ends.collect::<Vec<_>>())?.f_to_device(self.device)?;
        let logits = self.head(state)?.logits(&x.f_index_select(0, &ends)?)?;
        let logits = logits.f_to_device(Device::Cpu)?;
        (0..texts.len() as i64).map(|row| Vec::<f32>::try_from(logits.f_get(row)?)).collect()
    }
}
