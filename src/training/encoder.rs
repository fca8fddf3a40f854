//! The encoder's forward and backward pass on a CPU, as training needs them.
//!
//! Prompts lie packed one after another, so nothing is padded; a layer keeps what its backward pass needs and no more. About the arithmetic, the
//! [`Model`](crate::ranker::model::Model) is the authority: a test compares scores and all gradients with it.

use std::ops::Range;

use crate::ranker::loops::{add, dot, gelu, normalise, scale_and_shift, softmax, sum};
use crate::ranker::model::{Config, ENCODER, HEAD};
use crate::ranker::product::{Matrix, product};
use crate::ranker::tokenizer::Pieces;

/// Where every tensor lies among the parameters, which are one slice.
pub(super) struct Encoder {
    hidden: usize,
    heads: usize,
    epsilon: f32,
    embeddings: Embeddings,
    layers: Vec<Layer>,
    head: Linear,
    tensors: Vec<Span>,
}

/// One tensor among the parameters.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub name: String,
    pub shape: Vec<usize>,
    pub at: Range<usize>,
}

/// How many tensors the embeddings are.
const EMBEDDINGS: usize = 5;

struct Embeddings {
    words: usize,
    positions: usize,
    segments: usize,
    norm: Norm,
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

/// What a layer's backward pass needs of its forward pass. `rows` are the places the layer computes, `tokens` those it looks at.
struct Kept {
    /// tokens x hidden: the input.
    x: Vec<f32>,
    /// rows x hidden: the places of the input that the layer computes; `None` for all.
    of: Option<Vec<f32>>,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    /// Per prompt and head, rows x tokens of the prompt.
    attention: Vec<f32>,
    context: Vec<f32>,
    mix_norm: Normed,
    mixed: Vec<f32>,
    /// rows x intermediate: the activation's value and its derivative.
    active: Vec<f32>,
    slope: Vec<f32>,
    norm: Normed,
}

/// A batch after its forward pass.
pub(super) struct Tape {
    /// Number of pieces of each prompt.
    lengths: Vec<usize>,
    layers: Vec<Kept>,
    /// [CLS] vectors after the last layer.
    first: Vec<f32>,
    pub scores: Vec<f32>,
}

impl Encoder {
    /// Lays out the tensors of this shape. The passes take the activation for a GELU.
    pub fn new(config: &Config) -> Encoder {
        let (hidden, wide) = (config.hidden_size, config.intermediate_size);
        let mut tensors = Vec::new();
        let mut end = 0;
        let mut place = |name: String, shape: &[usize]| {
            let start = end;
            end += shape.iter().product::<usize>();
            tensors.push(Span { name, shape: shape.into(), at: start..end });
            start
        };
        let layers = (0..config.num_hidden_layers)
            .map(|index| {
                let name = |part: &str| format!("{ENCODER}.encoder.layer.{index}.{part}");
                let mut linear = |part: &str, input, output| Linear {
                    weight: place(name(&format!("{part}.weight")), &[output, input]),
                    bias: place(name(&format!("{part}.bias")), &[output]),
                    input,
                    output,
                };
                let (query, key, value) = (
                    linear("attention.self.query", hidden, hidden),
                    linear("attention.self.key", hidden, hidden),
                    linear("attention.self.value", hidden, hidden),
                );
                let mix = linear("attention.output.dense", hidden, hidden);
                let (up, down) = (linear("intermediate.dense", hidden, wide), linear("output.dense", wide, hidden));
                let mut norm = |part: &str| Norm {
                    weight: place(name(&format!("{part}.weight")), &[hidden]),
                    bias: place(name(&format!("{part}.bias")), &[hidden]),
                    size: hidden,
                };
                Layer { query, key, value, mix, mix_norm: norm("attention.output.LayerNorm"), up, down, norm: norm("output.LayerNorm") }
            })
            .collect();
        let head =
            Linear { weight: place(format!("{HEAD}.weight"), &[1, hidden]), bias: place(format!("{HEAD}.bias"), &[1]), input: hidden, output: 1 };
        let embeddings = format!("{ENCODER}.embeddings");
        let embeddings = Embeddings {
            words: place(format!("{embeddings}.word_embeddings.weight"), &[config.vocab_size, hidden]),
            positions: place(format!("{embeddings}.position_embeddings.weight"), &[config.max_position_embeddings, hidden]),
            segments: place(format!("{embeddings}.token_type_embeddings.weight"), &[config.type_vocab_size, hidden]),
            norm: Norm {
                weight: place(format!("{embeddings}.LayerNorm.weight"), &[hidden]),
                bias: place(format!("{embeddings}.LayerNorm.bias"), &[hidden]),
                size: hidden,
            },
        };
        Encoder { hidden, heads: config.num_attention_heads, epsilon: config.layer_norm_eps as f32, embeddings, layers, head, tensors }
    }

    /// All tensors in the order of the parameters.
    pub fn tensors(&self) -> &[Span] {
        &self.tensors
    }

    /// Those that training moves: all but the embeddings, which are half of the weights and would move for little. They come first.
    pub fn trained(&self) -> &[Span] {
        &self.tensors[..self.tensors.len() - EMBEDDINGS]
    }

    /// Parameters that training moves, counted.
    pub fn trained_size(&self) -> usize {
        self.head.bias + 1
    }

    /// Scores of a batch and what [`Encoder::backward`] needs.
    pub fn forward(&self, parameters: &[f32], batch: &[Pieces]) -> Tape {
        let lengths: Vec<usize> = batch.iter().map(Pieces::len).collect();
        let mut x = self.embed(parameters, batch);
        let mut layers = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            // Of the last layer only [CLS] is read.
            let of = (index + 1 == self.layers.len()).then(|| gather(&x, &lengths, self.hidden));
            let (y, kept) = self.forward_layer(layer, parameters, x, of, &lengths);
            x = y;
            layers.push(kept);
        }
        let scores = self.head.forward(parameters, &x);
        Tape { lengths, layers, first: x, scores }
    }

    /// Adds to `gradient`, laid out like the parameters that training moves, what the loss's slope by each score means for each parameter.
    pub fn backward(&self, parameters: &[f32], tape: &Tape, slopes: &[f32], gradient: &mut [f32]) {
        let mut dx = vec![0.0; tape.first.len()];
        self.head.backward(parameters, &tape.first, slopes, gradient, Some(&mut dx));
        for (depth, (layer, kept)) in self.layers.iter().zip(&tape.layers).enumerate().rev() {
            dx = self.backward_layer(layer, parameters, kept, &dx, &tape.lengths, gradient, depth > 0);
        }
    }

    fn embed(&self, parameters: &[f32], batch: &[Pieces]) -> Vec<f32> {
        let row = |table: usize, index: usize| &parameters[table + index * self.hidden..][..self.hidden];
        let segment = row(self.embeddings.segments, 0);
        let mut x = Vec::with_capacity(batch.iter().map(Pieces::len).sum::<usize>() * self.hidden);
        for pieces in batch {
            for (position, id) in pieces.ids().iter().enumerate() {
                let (word, position) = (row(self.embeddings.words, *id as usize), row(self.embeddings.positions, position));
                x.extend(word.iter().zip(position).zip(segment).map(|((word, position), segment)| word + (position + segment)));
            }
        }
        self.embeddings.norm.forward(parameters, &mut x, self.epsilon);
        x
    }

    fn forward_layer(&self, layer: &Layer, parameters: &[f32], x: Vec<f32>, of: Option<Vec<f32>>, lengths: &[usize]) -> (Vec<f32>, Kept) {
        let rows = of.as_ref().unwrap_or(&x);
        let (query, key, value) = (layer.query.forward(parameters, rows), layer.key.forward(parameters, &x), layer.value.forward(parameters, &x));
        let (attention, context) = self.attend(&query, &key, &value, lengths, of.is_some());
        let mut mixed = layer.mix.forward(parameters, &context);
        add(&mut mixed, rows);
        let mix_norm = layer.mix_norm.forward(parameters, &mut mixed, self.epsilon);
        let mut active = layer.up.forward(parameters, &mixed);
        let slope = active
            .iter_mut()
            .map(|x| {
                let (y, slope) = gelu(*x);
                *x = y;
                slope
            })
            .collect();
        let mut y = layer.down.forward(parameters, &active);
        add(&mut y, &mixed);
        let norm = layer.norm.forward(parameters, &mut y, self.epsilon);
        (y, Kept { x, of, query, key, value, attention, context, mix_norm, mixed, active, slope, norm })
    }

    /// The gradient by the layer's input; empty where `further` is false.
    #[expect(clippy::too_many_arguments, reason = "what a layer is, was given and gave")]
    fn backward_layer(
        &self,
        layer: &Layer,
        parameters: &[f32],
        kept: &Kept,
        dy: &[f32],
        lengths: &[usize],
        gradient: &mut [f32],
        further: bool,
    ) -> Vec<f32> {
        let dy = layer.norm.backward(parameters, &kept.norm, dy, gradient);
        let mut dactive = vec![0.0; kept.active.len()];
        layer.down.backward(parameters, &kept.active, &dy, gradient, Some(&mut dactive));
        for (dactive, slope) in dactive.iter_mut().zip(&kept.slope) {
            *dactive *= slope;
        }
        // The residual carries the gradient past the block.
        let mut dmixed = dy;
        layer.up.backward(parameters, &kept.mixed, &dactive, gradient, Some(&mut dmixed));
        let drows = layer.mix_norm.backward(parameters, &kept.mix_norm, &dmixed, gradient);
        let mut dcontext = vec![0.0; drows.len()];
        layer.mix.backward(parameters, &kept.context, &drows, gradient, Some(&mut dcontext));
        let (dquery, dkey, dvalue) = self.attend_backward(kept, &dcontext, lengths);
        let mut drows = drows;
        let rows = kept.of.as_ref().unwrap_or(&kept.x);
        layer.query.backward(parameters, rows, &dquery, gradient, further.then_some(&mut drows));
        let mut dx = match (&kept.of, further) {
            (None, true) => drows,
            (Some(_), true) => scatter(&drows, lengths, self.hidden),
            (_, false) => Vec::new(),
        };
        layer.key.backward(parameters, &kept.x, &dkey, gradient, further.then_some(&mut dx));
        layer.value.backward(parameters, &kept.x, &dvalue, gradient, further.then_some(&mut dx));
        dx
    }

    /// Attention weights per prompt and head, and what they gather. With `first` only each prompt's first place looks.
    fn attend(&self, query: &[f32], key: &[f32], value: &[f32], lengths: &[usize], first: bool) -> (Vec<f32>, Vec<f32>) {
        let size = self.hidden / self.heads;
        let scale = 1.0 / (size as f32).sqrt();
        let mut context = vec![0.0; query.len()];
        let mut attention = vec![0.0; self.heads * lengths.iter().map(|length| length * if first { 1 } else { *length }).sum::<usize>()];
        for part in self.parts(lengths, first) {
            let (rows, tokens, size) = (part.rows, part.tokens, size);
            let weights = &mut attention[part.weights.clone()];
            let (row, token) = (Matrix::rows(self.hidden), Matrix::rows(self.hidden));
            product(weights, Matrix::rows(tokens), [rows, size, tokens], &query[part.row..], row, &key[part.token..], token.turned(), 1.0, false);
            weights.chunks_exact_mut(tokens).for_each(|row| softmax(row, scale));
            product(&mut context[part.row..], row, [rows, tokens, size], weights, Matrix::rows(tokens), &value[part.token..], token, 1.0, false);
        }
        (attention, context)
    }

    /// Gradients by query, key and value.
    fn attend_backward(&self, kept: &Kept, dcontext: &[f32], lengths: &[usize]) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let size = self.hidden / self.heads;
        let scale = 1.0 / (size as f32).sqrt();
        let (mut dquery, mut dkey, mut dvalue) = (vec![0.0; kept.query.len()], vec![0.0; kept.key.len()], vec![0.0; kept.value.len()]);
        let mut dweights = Vec::new();
        for part in self.parts(lengths, kept.of.is_some()) {
            let (rows, tokens) = (part.rows, part.tokens);
            let weights = &kept.attention[part.weights.clone()];
            let (wide, narrow) = (Matrix::rows(self.hidden), Matrix::rows(tokens));
            let (dcontext, value) = (&dcontext[part.row..], &kept.value[part.token..]);
            product(&mut dvalue[part.token..], wide, [tokens, rows, size], weights, narrow.turned(), dcontext, wide, 1.0, false);
            dweights.clear();
            dweights.resize(rows * tokens, 0.0);
            product(&mut dweights, narrow, [rows, size, tokens], dcontext, wide, value, wide.turned(), 1.0, false);
            for (dweights, weights) in dweights.chunks_exact_mut(tokens).zip(weights.chunks_exact(tokens)) {
                let mean: f32 = dot(dweights, weights);
                for (dweight, weight) in dweights.iter_mut().zip(weights) {
                    *dweight = weight * (*dweight - mean);
                }
            }
            product(&mut dquery[part.row..], wide, [rows, tokens, size], &dweights, narrow, &kept.key[part.token..], wide, scale, false);
            product(&mut dkey[part.token..], wide, [tokens, rows, size], &dweights, narrow.turned(), &kept.query[part.row..], wide, scale, false);
        }
        (dquery, dkey, dvalue)
    }

    /// Where each prompt's and head's share of the matrices begins.
    fn parts(&self, lengths: &[usize], first: bool) -> Vec<Part> {
        let size = self.hidden / self.heads;
        let (mut row, mut token, mut weight) = (0, 0, 0);
        let mut parts = Vec::with_capacity(lengths.len() * self.heads);
        for &tokens in lengths {
            let rows = if first { 1 } else { tokens };
            for head in 0..self.heads {
                let weights = weight..weight + rows * tokens;
                weight = weights.end;
                parts.push(Part { rows, tokens, row: row * self.hidden + head * size, token: token * self.hidden + head * size, weights });
            }
            row += rows;
            token += tokens;
        }
        parts
    }
}

/// One head's attention within one prompt.
struct Part {
    rows: usize,
    tokens: usize,
    /// First element among queries and contexts.
    row: usize,
    /// First element among keys and values.
    token: usize,
    weights: Range<usize>,
}

/// y = x W' + b, with W as output x input.
struct Linear {
    weight: usize,
    bias: usize,
    input: usize,
    output: usize,
}

impl Linear {
    fn forward(&self, parameters: &[f32], x: &[f32]) -> Vec<f32> {
        let rows = x.len() / self.input;
        let bias = &parameters[self.bias..][..self.output];
        let mut y = Vec::with_capacity(rows * self.output);
        (0..rows).for_each(|_| y.extend_from_slice(bias));
        let weight = Matrix::rows(self.input).turned();
        let shape = [rows, self.input, self.output];
        product(&mut y, Matrix::rows(self.output), shape, x, Matrix::rows(self.input), &parameters[self.weight..], weight, 1.0, true);
        y
    }

    /// Adds to the gradients by the weights, the bias and, unless `None`, the input.
    fn backward(&self, parameters: &[f32], x: &[f32], dy: &[f32], gradient: &mut [f32], dx: Option<&mut Vec<f32>>) {
        let rows = x.len() / self.input;
        let (narrow, wide) = (Matrix::rows(self.input), Matrix::rows(self.output));
        product(&mut gradient[self.weight..], narrow, [self.output, rows, self.input], dy, wide.turned(), x, narrow, 1.0, true);
        let bias = &mut gradient[self.bias..][..self.output];
        dy.chunks_exact(self.output).for_each(|dy| add(bias, dy));
        if let Some(dx) = dx {
            product(dx, narrow, [rows, self.output, self.input], dy, wide, &parameters[self.weight..], narrow, 1.0, true);
        }
    }
}

/// Layer norm.
struct Norm {
    weight: usize,
    bias: usize,
    size: usize,
}

/// Rows before scale and shift, and one over their deviation.
struct Normed {
    x: Vec<f32>,
    inverse: Vec<f32>,
}

impl Norm {
    fn forward(&self, parameters: &[f32], x: &mut [f32], epsilon: f32) -> Normed {
        let (weight, bias) = (&parameters[self.weight..][..self.size], &parameters[self.bias..][..self.size]);
        let mut normed = Normed { x: Vec::with_capacity(x.len()), inverse: Vec::with_capacity(x.len() / self.size) };
        for row in x.chunks_exact_mut(self.size) {
            normed.inverse.push(normalise(row, epsilon));
            normed.x.extend_from_slice(row);
            scale_and_shift(row, weight, bias);
        }
        normed
    }

    fn backward(&self, parameters: &[f32], normed: &Normed, dy: &[f32], gradient: &mut [f32]) -> Vec<f32> {
        let weight = &parameters[self.weight..][..self.size];
        let mut dx = dy.to_vec();
        for ((dx, x), inverse) in dx.chunks_exact_mut(self.size).zip(normed.x.chunks_exact(self.size)).zip(&normed.inverse) {
            add(&mut gradient[self.bias..][..self.size], dx);
            for ((gradient, dx), x) in gradient[self.weight..][..self.size].iter_mut().zip(&*dx).zip(x) {
                *gradient += dx * x;
            }
            dx.iter_mut().zip(weight).for_each(|(dx, weight)| *dx *= weight);
            let (mean, along) = (sum(dx) / self.size as f32, dot(dx, x) / self.size as f32);
            for (dx, x) in dx.iter_mut().zip(x) {
                *dx = inverse * (*dx - mean - x * along);
            }
        }
        dx
    }
}

/// The first row of each prompt.
fn gather(x: &[f32], lengths: &[usize], size: usize) -> Vec<f32> {
    let mut rows = Vec::with_capacity(lengths.len() * size);
    let mut at = 0;
    for length in lengths {
        rows.extend_from_slice(&x[at * size..][..size]);
        at += length;
    }
    rows
}

/// Zeros but for the first row of each prompt.
fn scatter(rows: &[f32], lengths: &[usize], size: usize) -> Vec<f32> {
    let mut x = vec![0.0; lengths.iter().sum::<usize>() * size];
    let mut at = 0;
    for (row, length) in rows.chunks_exact(size).zip(lengths) {
        x[at * size..][..size].copy_from_slice(row);
        at += length;
    }
    x
}
