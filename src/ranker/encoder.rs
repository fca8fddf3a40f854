//! The encoder as it serves on a CPU: [`Model`](super::model::Model)'s numbers in a third of its time, without a gradient.
//!
//! Prompts lie packed one after another, so nothing is padded; weights are packed once for the product's kernel; biases, layer norms and activations are
//! loops over rows that are still in the cache. Of the last layer only the row of [CLS] is computed.

use std::sync::{Mutex, PoisonError};

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::loops::{activate, add, dot, normalise, scale_and_shift, softmax};
use super::model::{Activation, Config, ENCODER, HEAD};
use super::product::{Processor, Rows};
use super::tokenizer::Pieces;
use super::weights::RankerError;

/// Rows that go through a feed-forward block together: few enough to stay in the second cache, enough to read the weights seldom.
const BLOCK: usize = 96;

/// y = x W + b.
struct Linear {
    weight: Vec<f32>,
    bias: Vec<f32>,
    input: usize,
}

impl Linear {
    fn forward(&self, processor: Processor, x: &[f32], y: &mut [f32]) {
        let (rows, output) = (x.len() / self.input, self.bias.len());
        y.chunks_exact_mut(output).for_each(|row| row.copy_from_slice(&self.bias));
        processor.multiply(y, output, [rows, self.input, output], Rows { values: x, stride: self.input }, &self.weight, true);
    }
}

struct Norm {
    weight: Vec<f32>,
    bias: Vec<f32>,
    epsilon: f32,
}

impl Norm {
    #[inline(always)]
    fn forward(&self, row: &mut [f32]) {
        normalise(row, self.epsilon);
        scale_and_shift(row, &self.weight, &self.bias);
    }

    /// Layer norm of every row's sum with its residual.
    #[inline(always)]
    fn close(&self, y: &mut [f32], residual: &[f32]) {
        let size = self.weight.len();
        for (row, residual) in y.chunks_exact_mut(size).zip(residual.chunks_exact(size)) {
            add(row, residual);
            self.forward(row);
        }
    }
}

struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    mix: Linear,
    mix_norm: Norm,
    up: Linear,
    down: Linear,
    norm: Norm,
}

/// Embeddings of the vocabulary, half of all weights; in half precision where that is what they are.
enum Words {
    Half(Vec<f16>),
    Single(Vec<f32>),
}

impl Words {
    fn of(values: Vec<f32>) -> Words {
        let halves: Vec<f16> = values.iter().map(|value| f16::from_f32(*value)).collect();
        let exact = halves.iter().zip(&values).all(|(half, value)| half.to_f32() == *value);
        if exact { Words::Half(halves) } else { Words::Single(values) }
    }

    fn len(&self) -> usize {
        match self {
            Words::Half(values) => values.len(),
            Words::Single(values) => values.len(),
        }
    }

    /// The values from `at` on, as many as `row` takes.
    fn copy(&self, at: usize, row: &mut [f32]) {
        match self {
            Words::Half(values) => values[at..][..row.len()].convert_to_f32_slice(row),
            Words::Single(values) => row.copy_from_slice(&values[at..][..row.len()]),
        }
    }
}

/// A BERT and its head, packed for this processor.
pub struct Encoder {
    processor: Processor,
    hidden: usize,
    heads: usize,
    activation: Activation,
    words: Words,
    /// Each position's embedding with the first segment's, which is everyone's.
    positions: Vec<f32>,
    norm: Norm,
    layers: Vec<Layer>,
    head: Vec<f32>,
    head_bias: f32,
    /// As many as batches that were ever scored at the same time.
    scratch: Mutex<Vec<Scratch>>,
}

/// Room for what stands between two steps; grows to what the largest batch needs.
#[derive(Default)]
struct Scratch {
    x: Vec<f32>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    context: Vec<f32>,
    mixed: Vec<f32>,
    wide: Vec<f32>,
    /// Of one prompt and head: keys turned, values, attention weights.
    keys: Vec<f32>,
    values: Vec<f32>,
    weights: Vec<f32>,
}

impl Encoder {
    /// Takes the tensors, by name and shape, from `tensor`: the encoder's under `bert.`, the head's under `head.`, as in a checkpoint.
    ///
    /// # Errors
    /// Those of `tensor`.
    pub fn new(config: &Config, tensor: impl Fn(&str, &[usize]) -> Result<Vec<f32>, RankerError>) -> Result<Encoder, RankerError> {
        Encoder::on(Processor::detect(), config, tensor)
    }

    fn on(processor: Processor, config: &Config, tensor: impl Fn(&str, &[usize]) -> Result<Vec<f32>, RankerError>) -> Result<Encoder, RankerError> {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let linear = |name: String, input: usize, output: usize| {
            let weight = tensor(&format!("{name}.weight"), &[output, input])?;
            let at = |row: usize, column: usize| weight[column * input + row];
            let mut packed = Vec::new();
            processor.pack(&mut packed, input, output, at);
            Ok(Linear { weight: packed, bias: tensor(&format!("{name}.bias"), &[output])?, input })
        };
        let norm = |name: String| {
            let part = |part| tensor(&format!("{name}.{part}"), &[hidden]);
            Ok(Norm { weight: part("weight")?, bias: part("bias")?, epsilon: config.layer_norm_eps as f32 })
        };
        let layer = |index| {
            let name = |part: &str| format!("{ENCODER}.encoder.layer.{index}.{part}");
            Ok(Layer {
                query: linear(name("attention.self.query"), hidden, hidden)?,
                key: linear(name("attention.self.key"), hidden, hidden)?,
                value: linear(name("attention.self.value"), hidden, hidden)?,
                mix: linear(name("attention.output.dense"), hidden, hidden)?,
                mix_norm: norm(name("attention.output.LayerNorm"))?,
                up: linear(name("intermediate.dense"), hidden, wide)?,
                down: linear(name("output.dense"), wide, hidden)?,
                norm: norm(name("output.LayerNorm"))?,
            })
        };
        let table = |name: &str, rows| tensor(&format!("{ENCODER}.embeddings.{name}.weight"), &[rows, hidden]);
        let segments = table("token_type_embeddings", config.type_vocab_size)?;
        let mut positions = table("position_embeddings", config.max_position_embeddings)?;
        positions.chunks_exact_mut(hidden).for_each(|row| add(row, &segments));
        Ok(Encoder {
            processor,
            hidden,
            heads: config.num_attention_heads,
            activation: config.hidden_act,
            words: Words::of(table("word_embeddings", config.vocab_size)?),
            positions,
            norm: norm(format!("{ENCODER}.embeddings.LayerNorm"))?,
            layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_, RankerError>>()?,
            head: tensor(&format!("{HEAD}.weight"), &[1, hidden])?,
            head_bias: tensor(&format!("{HEAD}.bias"), &[1])?[0],
            scratch: Mutex::default(),
        })
    }

    /// One score per entry, in order.
    ///
    /// # Errors
    /// [`RankerError::Compute`] where a prompt is empty, longer than the encoder has positions, or has an id that is no piece.
    pub fn scores(&self, batch: &[Pieces]) -> Result<Vec<f32>, RankerError> {
        let (positions, words) = (self.positions.len() / self.hidden, self.words.len() / self.hidden);
        for pieces in batch {
            if pieces.is_empty() || pieces.len() > positions {
                return Err(RankerError::Compute(format!("a prompt of {} pieces for an encoder of {positions} positions", pieces.len())));
            }
            if let Some(id) = pieces.ids().iter().find(|id| **id as usize >= words) {
                return Err(RankerError::Compute(format!("piece {id} of a vocabulary of {words}")));
            }
        }
        let pool = || self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let mut scratch = pool().pop().unwrap_or_default();
        let scores = self.forward(batch, &mut scratch);
        pool().push(scratch);
        Ok(scores)
    }

    fn forward(&self, batch: &[Pieces], scratch: &mut Scratch) -> Vec<f32> {
        let hidden = self.hidden;
        let tokens = batch.iter().map(Pieces::len).sum::<usize>();
        let mut x = room(&mut scratch.x, tokens * hidden);
        let [query, key, value, context] =
            [&mut scratch.query, &mut scratch.key, &mut scratch.value, &mut scratch.context].map(|buffer| room(buffer, tokens * hidden));
        self.processor.run(|| self.embed(batch, x));
        for (index, layer) in self.layers.iter().enumerate() {
            let last = index + 1 == self.layers.len();
            layer.key.forward(self.processor, x, key);
            layer.value.forward(self.processor, x, value);
            if last {
                let mut at = 0;
                for (index, pieces) in batch.iter().enumerate() {
                    x.copy_within(at * hidden..(at + 1) * hidden, index * hidden);
                    at += pieces.len();
                }
                x = &mut x[..batch.len() * hidden];
            }
            let (query, context) = (&mut query[..x.len()], &mut context[..x.len()]);
            layer.query.forward(self.processor, x, query);
            self.attend(query, key, value, context, batch, last, [&mut scratch.keys, &mut scratch.values, &mut scratch.weights]);
            for (x, context) in x.chunks_mut(BLOCK * hidden).zip(context.chunks(BLOCK * hidden)) {
                let rows = x.len() / hidden;
                let mixed = room(&mut scratch.mixed, x.len());
                layer.mix.forward(self.processor, context, mixed);
                self.processor.run(|| layer.mix_norm.close(mixed, x));
                let wide = room(&mut scratch.wide, rows * layer.up.bias.len());
                layer.up.forward(self.processor, mixed, wide);
                self.processor.run(|| activate(wide, self.activation));
                layer.down.forward(self.processor, wide, x);
                self.processor.run(|| layer.norm.close(x, mixed));
            }
        }
        x.chunks_exact(hidden).map(|row| dot(row, &self.head) + self.head_bias).collect()
    }

    #[inline(always)]
    fn embed(&self, batch: &[Pieces], x: &mut [f32]) {
        let hidden = self.hidden;
        let pieces = batch.iter().flat_map(|pieces| pieces.ids().iter().zip(self.positions.chunks_exact(hidden)));
        for (row, (id, position)) in x.chunks_exact_mut(hidden).zip(pieces) {
            self.words.copy(*id as usize * hidden, row);
            add(row, position);
            self.norm.forward(row);
        }
    }

    /// What each place gathers of its prompt. With `first` only each prompt's first place looks.
    #[expect(clippy::too_many_arguments, reason = "what attention reads and writes")]
    fn attend(
        &self,
        query: &[f32],
        key: &[f32],
        value: &[f32],
        context: &mut [f32],
        batch: &[Pieces],
        first: bool,
        [keys, values, weights]: [&mut Vec<f32>; 3],
    ) {
        let hidden = self.hidden;
        let size = hidden / self.heads;
        let scale = 1.0 / (size as f32).sqrt();
        let (mut token, mut row) = (0, 0);
        for pieces in batch {
            let tokens = pieces.len();
            let rows = if first { 1 } else { tokens };
            let stride = tokens.next_multiple_of(self.processor.width(tokens));
            let weights = room(weights, rows * stride);
            for head in 0..self.heads {
                let [at, of] = [token, row].map(|row| row * hidden + head * size);
                self.processor.pack(keys, size, tokens, |row, column| key[at + column * hidden + row]);
                self.processor.pack(values, tokens, size, |row, column| value[at + row * hidden + column]);
                self.processor.multiply(weights, stride, [rows, size, tokens], Rows { values: &query[of..], stride: hidden }, keys, false);
                self.processor.run(|| weights.chunks_exact_mut(stride).for_each(|row| softmax(&mut row[..tokens], scale)));
                self.processor.multiply(&mut context[of..], hidden, [rows, tokens, size], Rows { values: weights, stride }, values, false);
            }
            token += tokens;
            row += rows;
        }
    }
}

/// So many elements of a buffer, whatever they are.
fn room(buffer: &mut Vec<f32>, size: usize) -> &mut [f32] {
    if buffer.len() < size {
        buffer.resize(size, 0.0);
    }
    &mut buffer[..size]
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::VarBuilder;

    use super::*;
    use crate::ranker::model::Model;
    use crate::ranker::weights::tests::{TINY, arbitrary_tensors};

    /// Sizes that fill no panel, and positions for prompts as long as those served.
    fn config(activation: Activation) -> Config {
        Config {
            hidden_size: 30,
            num_attention_heads: 3,
            intermediate_size: 50,
            num_hidden_layers: 3,
            max_position_embeddings: 128,
            hidden_act: activation,
            ..TINY
        }
    }

    /// The reference with arbitrary weights, and the same on every processor.
    fn models(config: &Config) -> (Model, Vec<Encoder>) {
        let tensors = arbitrary_tensors(config, 1);
        let tensor = |name: &str, shape: &[usize]| {
            assert_eq!(tensors[name].dims(), shape, "{name}");
            Ok(tensors[name].flatten_all().unwrap().to_vec1().unwrap())
        };
        let encoders = Processor::all().into_iter().map(|processor| Encoder::on(processor, config, tensor).unwrap()).collect();
        (Model::new(config, VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu)).unwrap(), encoders)
    }

    fn prompt(length: usize) -> Pieces {
        Pieces::of_ids((0..length).map(|at| ((at * at + length) % TINY.vocab_size) as u32).collect())
    }

    #[test]
    fn prompts_of_every_length_score_what_the_reference_says_alone_and_together() {
        let (model, encoders) = models(&config(Activation::Gelu));
        let batch: Vec<Pieces> = (1..=128).map(prompt).collect();
        let expected: Vec<f32> = batch.iter().map(|pieces| model.forward(std::slice::from_ref(pieces)).unwrap().to_vec1().unwrap()[0]).collect();
        let spread = expected.iter().copied().fold(f32::MIN, f32::max) - expected.iter().copied().fold(f32::MAX, f32::min);
        assert!(spread > 0.1, "{spread}");
        for encoder in encoders {
            let together = encoder.scores(&batch).unwrap();
            for ((pieces, expected), together) in batch.iter().zip(&expected).zip(together) {
                let alone = encoder.scores(std::slice::from_ref(pieces)).unwrap()[0];
                let length = pieces.len();
                assert!((alone - expected).abs() < 1e-4, "{:?}, {length} pieces: {alone}, not {expected}", encoder.processor);
                assert!((alone - together).abs() < 1e-5, "{:?}, {length} pieces: {alone} alone, {together} in a batch", encoder.processor);
            }
        }
    }

    #[test]
    fn every_activation_is_the_reference_s() {
        for activation in [Activation::GeluNew, Activation::Relu, Activation::Silu] {
            let (model, encoders) = models(&config(activation));
            let expected: Vec<f32> = model.forward(&[prompt(20)]).unwrap().to_vec1().unwrap();
            for encoder in encoders {
                let score = encoder.scores(&[prompt(20)]).unwrap()[0];
                assert!((score - expected[0]).abs() < 1e-4, "{:?} {activation:?}: {score}, not {}", encoder.processor, expected[0]);
            }
        }
    }

    #[test]
    fn a_batch_that_the_encoder_cannot_take_is_refused() {
        let (_, encoders) = models(&config(Activation::Gelu));
        for encoder in encoders {
            assert!(encoder.scores(&[]).unwrap().is_empty());
            for ids in [vec![], vec![0; 129], vec![2, 16]] {
                let refused = encoder.scores(&[prompt(3), Pieces::of_ids(ids)]);
                assert!(matches!(refused, Err(RankerError::Compute(_))), "{refused:?}");
            }
        }
    }
}
