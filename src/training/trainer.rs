//! The training loop: batches, schedule, clipping, steps.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarBuilder};

use super::loss::Loss;
use super::metrics::agreement;
use crate::ranker::model::{Config, ENCODER, HEAD, Model};
use crate::ranker::tokenizer::Pieces;

/// What can be chosen about a training.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Recipe {
    pub loss: Loss,
    /// Passes over the data.
    pub epochs: usize,
    /// Prompts whose pairs are compared with each other.
    pub batch: usize,
    /// Highest learning rate of the encoder; the head, which starts from nothing, learns ten times as fast.
    pub rate: f64,
    /// Share of the steps in which the rate rises to its highest; then it falls to zero in a straight line.
    pub warmup: f64,
    pub weight_decay: f64,
    /// Longest gradient, as a norm over all tensors.
    pub clip: f64,
    /// Pairs count if their lengths differ by this share of the longer.
    pub delta: f64,
    pub seed: u64,
}

/// One prompt to learn from or to watch.
#[derive(Clone, Debug)]
pub struct Sample {
    pub pieces: Pieces,
    /// Logarithm of the length.
    pub length: f64,
}

/// A small reproducible source of chance (SplitMix64).
pub(super) struct Chance(u64);

impl Chance {
    pub(super) fn new(seed: u64) -> Chance {
        Chance(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Below `bound`, which is not zero. The bias of the remainder is far below what any use here can notice.
    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for index in (1..items.len()).rev() {
            items.swap(index, self.below(index + 1));
        }
    }
}

/// A model and the variables it is made of.
pub struct Trainee {
    model: Model,
    vars: BTreeMap<String, Var>,
}

/// Batches are drawn from chunks of this many batches sorted by length, so that little is padded.
const CHUNK: usize = 16;

impl Trainee {
    /// From the tensors of a checkpoint; those that `config` does not ask for are left out. Without a head in it, the head starts near zero.
    ///
    /// # Errors
    /// A tensor is missing or has the wrong shape.
    pub fn new(config: &Config, mut tensors: HashMap<String, Tensor>, device: &Device, seed: u64) -> Result<Trainee> {
        let mut chance = Chance::new(seed);
        let head: Vec<f32> = (0..config.hidden_size).map(|_| (chance.below(2001) as f32 / 1000.0 - 1.0) * 0.03).collect();
        tensors.entry(format!("{HEAD}.weight")).or_insert(Tensor::from_vec(head, (1, config.hidden_size), &Device::Cpu)?);
        tensors.entry(format!("{HEAD}.bias")).or_insert(Tensor::zeros(1, DType::F32, &Device::Cpu)?);
        let layer = format!("{ENCODER}.encoder.layer.");
        let wanted = |name: &str| match name.strip_prefix(&layer) {
            Some(rest) => rest.split('.').next().and_then(|index| index.parse().ok()).is_some_and(|index: usize| index < config.num_hidden_layers),
            // A pooler is no part of a ranker.
            None => name.starts_with(HEAD) || name.starts_with(&format!("{ENCODER}.embeddings.")),
        };
        let vars: BTreeMap<String, Var> = tensors
            .into_iter()
            .filter(|(name, _)| wanted(name))
            .map(|(name, tensor)| Ok((name, Var::from_tensor(&tensor.to_device(device)?)?)))
            .collect::<Result<_>>()?;
        let shared = vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect();
        let model = Model::new(config, VarBuilder::from_tensors(shared, DType::F32, device))?;
        Ok(Trainee { model, vars })
    }

    /// The tensors as they are now.
    pub fn tensors(&self) -> BTreeMap<String, Tensor> {
        self.vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().clone())).collect()
    }

    /// Scores in the order of `samples`.
    pub fn scores(&self, samples: &[Sample]) -> Result<Vec<f64>> {
        let mut order: Vec<usize> = (0..samples.len()).collect();
        order.sort_by_key(|index| samples[*index].pieces.len());
        let mut scores = vec![0.0; samples.len()];
        for indices in order.chunks(32) {
            let batch: Vec<Pieces> = indices.iter().map(|index| samples[*index].pieces.clone()).collect();
            for (index, score) in indices.iter().zip(self.model.forward(&batch)?.to_vec1::<f32>()?) {
                scores[*index] = f64::from(score);
            }
        }
        Ok(scores)
    }

    /// Trains on `samples`, watching `validation` after every pass. `report` gets a line whenever there is something to say.
    pub fn train(&mut self, recipe: &Recipe, samples: &[Sample], validation: &[Sample], report: &mut dyn FnMut(String)) -> Result<()> {
        let (head, encoder): (Vec<_>, Vec<_>) =
            self.vars.iter().filter(|(name, _)| !name.contains(".embeddings.")).partition(|(name, _)| name.starts_with(HEAD));
        let optimizer = |vars: Vec<(&String, &Var)>, lr| {
            let vars = vars.into_iter().map(|(_, var)| var.clone()).collect();
            AdamW::new(vars, ParamsAdamW { lr, weight_decay: recipe.weight_decay, ..ParamsAdamW::default() })
        };
        let trained: Vec<Var> = head.iter().chain(&encoder).map(|(_, var)| (*var).clone()).collect();
        let (mut head, mut encoder) = (optimizer(head, 0.0)?, optimizer(encoder, 0.0)?);
        let mut chance = Chance::new(recipe.seed);
        let mut order: Vec<usize> = (0..samples.len()).collect();
        let steps = recipe.epochs * samples.len().div_ceil(recipe.batch);
        let (mut step, mut shown, start) = (0, 0.0, Instant::now());
        for epoch in 1..=recipe.epochs {
            for batch in batches(samples, &mut order, recipe.batch, &mut chance) {
                step += 1;
                let rate = recipe.rate * schedule(step, steps, recipe.warmup);
                let pieces: Vec<Pieces> = batch.iter().map(|index| samples[*index].pieces.clone()).collect();
                let lengths: Vec<f64> = batch.iter().map(|index| samples[*index].length).collect();
                let Some(loss) = recipe.loss.of(&self.model.forward(&pieces)?, &lengths, recipe.delta)? else { continue };
                let mut gradients = loss.backward()?;
                clip(&mut gradients, &trained, recipe.clip)?;
                encoder.set_learning_rate(rate);
                head.set_learning_rate(rate * 10.0);
                encoder.step(&gradients)?;
                head.step(&gradients)?;
                let loss = f64::from(loss.to_scalar::<f32>()?);
                shown = if shown == 0.0 { loss } else { 0.95 * shown + 0.05 * loss };
                if step % 20 == 0 {
                    let seconds = start.elapsed().as_secs_f64();
                    let left = seconds / step as f64 * (steps - step.min(steps)) as f64;
                    report(format!("epoch {epoch}/{}  step {step}/{steps}  loss {shown:.4}  {seconds:.0} s, {left:.0} s to go", recipe.epochs));
                }
            }
            if !validation.is_empty() {
                let lengths: Vec<f64> = validation.iter().map(|sample| sample.length).collect();
                let agreement = agreement(&self.scores(validation)?, &lengths, recipe.delta);
                report(format!("epoch {epoch}/{}  validation tau-b {:.4}  pair accuracy {:.4}", recipe.epochs, agreement.tau, agreement.accuracy));
            }
        }
        Ok(())
    }
}

/// Batches of one pass, in random order, each of prompts of about the same length.
fn batches(samples: &[Sample], order: &mut [usize], size: usize, chance: &mut Chance) -> Vec<Vec<usize>> {
    chance.shuffle(order);
    let mut batches = Vec::new();
    for chunk in order.chunks_mut(size * CHUNK) {
        chunk.sort_by_key(|index| samples[*index].pieces.len());
        batches.extend(chunk.chunks(size).map(<[usize]>::to_vec));
    }
    chance.shuffle(&mut batches);
    batches
}

/// The share of the highest rate at this step, counted from 1.
fn schedule(step: usize, steps: usize, warmup: f64) -> f64 {
    let (step, steps) = (step as f64, steps as f64);
    let rise = (steps * warmup).max(1.0);
    (step / rise).min((steps - step + 1.0) / (steps - rise).max(1.0)).clamp(0.0, 1.0)
}

/// Shortens the gradient to at most `norm`.
fn clip(gradients: &mut GradStore, vars: &[Var], norm: f64) -> Result<()> {
    let mut sum = 0.0;
    for var in vars {
        if let Some(gradient) = gradients.get(var) {
            sum += f64::from(gradient.sqr()?.sum_all()?.to_scalar::<f32>()?);
        }
    }
    let length = sum.sqrt();
    if length > norm {
        for var in vars {
            if let Some(gradient) = gradients.remove(var) {
                gradients.insert(var, (gradient * (norm / length))?);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranker::weights::tests::{TINY, tiny_tensors};

    fn trainee() -> Trainee {
        Trainee::new(&TINY, tiny_tensors(3), &Device::Cpu, 1).unwrap()
    }

    /// Prompts whose length is told by how many of their pieces are a certain word.
    fn samples() -> Vec<Sample> {
        let mut chance = Chance::new(5);
        (0..64)
            .map(|_| {
                let mut ids = vec![2];
                ids.extend((0..6).map(|_| if chance.below(2) == 0 { 13 } else { 8 }));
                let long = ids.iter().filter(|id| **id == 13).count();
                Sample { pieces: Pieces::of_ids(ids), length: long as f64 }
            })
            .collect()
    }

    fn recipe() -> Recipe {
        Recipe { loss: Loss::Pairwise, epochs: 12, batch: 16, rate: 3e-3, warmup: 0.1, weight_decay: 0.01, clip: 1.0, delta: 0.2, seed: 1 }
    }

    #[test]
    fn every_weight_above_the_embeddings_gets_a_gradient() {
        let trainee = trainee();
        let batch: Vec<Pieces> = samples()[..4].iter().map(|sample| sample.pieces.clone()).collect();
        let gradients = trainee.model.forward(&batch).unwrap().sqr().unwrap().sum_all().unwrap().backward().unwrap();
        for (name, var) in &trainee.vars {
            let moved = gradients.get(var).is_some_and(|gradient| gradient.abs().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap() > 0.0);
            // Of the key's bias no attention depends: a constant in every logit of a row cancels in the softmax.
            assert!(moved != name.contains(".embeddings.") || name.ends_with("key.bias"), "{name}: {moved}");
        }
        assert_eq!(trainee.vars.len(), 5 + 16 * 2 + 2);
    }

    #[test]
    fn gradients_of_the_encoder_are_those_of_finite_differences() {
        let trainee = trainee();
        let batch: Vec<Pieces> = [vec![2, 8, 13, 9], vec![2, 10]].map(Pieces::of_ids).into();
        let value = |trainee: &Trainee| trainee.model.forward(&batch).unwrap().sum_all().unwrap();
        let gradients = value(&trainee).backward().unwrap();
        for name in ["bert.encoder.layer.0.attention.self.query.weight", "bert.encoder.layer.0.output.LayerNorm.weight", "head.weight"] {
            let var = &trainee.vars[name];
            let gradient = gradients.get(var).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()[3];
            let original = var.as_tensor().copy().unwrap();
            let mut values = original.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let mut at = |by: f32| {
                values[3] += by;
                var.set(&Tensor::from_slice(&values, original.shape(), &Device::Cpu).unwrap()).unwrap();
                values[3] -= by;
                value(&trainee).to_scalar::<f32>().unwrap()
            };
            let numeric = (at(1e-2) - at(-1e-2)) / 2e-2;
            var.set(&original).unwrap();
            assert!((numeric - gradient).abs() < 2e-2 * gradient.abs().max(0.5), "{name}: {numeric} and {gradient}");
        }
    }

    #[test]
    fn training_learns_an_order_and_a_seed_repeats_it() {
        let samples = samples();
        let trained = || {
            let mut trainee = trainee();
            trainee.train(&recipe(), &samples[..48], &samples[48..], &mut |_| ()).unwrap();
            trainee.scores(&samples).unwrap()
        };
        let scores = trained();
        let lengths: Vec<f64> = samples.iter().map(|sample| sample.length).collect();
        let tau = agreement(&scores[48..], &lengths[48..], 0.2).tau;
        assert!(tau > 0.7, "{tau}");
        assert_eq!(scores, trained());
    }

    #[test]
    fn the_rate_rises_then_falls_to_almost_nothing() {
        let rates: Vec<f64> = (1..=100).map(|step| schedule(step, 100, 0.1)).collect();
        assert!((rates[4] - 0.5).abs() < 1e-9 && (rates[9] - 1.0).abs() < 1e-9 && rates[99] < 0.02, "{rates:?}");
        assert!(rates[10..].is_sorted_by(|a, b| a >= b));
    }
}
