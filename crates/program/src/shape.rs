//! Shapes of a graph's values, as numbers.

use crate::{
    Dtype, Graph, InputSource, ValueId,
    schema::{Hint, JsonSize, TensorMeta},
    size::{Amount, LinearSize, Symbols, evaluated, symbol},
};

/// A tensor whose sizes are known.
#[derive(Clone, Debug)]
pub(crate) struct TensorShape {
    pub(crate) dtype: Dtype,
    pub(crate) sizes: Vec<Amount>,
    /// Distance between neighbours along each axis, in elements; `None` if unknown.
    pub(crate) strides: Option<Vec<Amount>>,
    /// Number of values.
    pub(crate) len: Amount,
}

/// PyTorch has no tensors with more axes.
const MAX_TENSOR_AXES: usize = 64;

impl TensorShape {
    fn new(meta: &TensorMeta, symbols: &Symbols) -> Option<Self> {
        let amount = |size: &JsonSize| {
            let size = match size {
                JsonSize::AsInt(size) => LinearSize::fixed(*size),
                JsonSize::AsExpr(expression) => evaluated(&expression.expr_str, symbols)?,
            };
            size.amount()
        };
        let amounts = |sizes: &[JsonSize]| sizes.iter().map(amount).collect::<Option<Vec<_>>>();
        if meta.sizes.len() > MAX_TENSOR_AXES || meta.strides.len() > MAX_TENSOR_AXES {
            return None;
        }
        let sizes = amounts(&meta.sizes)?;
        let len = sizes.iter().try_fold(Amount::fixed(1), |len, size| len.product(*size))?;
        Some(Self { dtype: Dtype::of(meta.dtype)?, sizes, strides: amounts(&meta.strides), len })
    }

    /// Size of all values, bytes.
    pub(crate) fn bytes(&self) -> Amount {
        self.len.times(self.dtype.bytes())
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        let Some(strides) = &self.strides else { return true };
        let mut next = Some(Amount::fixed(1));
        let axes = self.sizes.iter().zip(strides).rev();
        for (size, stride) in axes.filter(|(size, _)| **size != Amount::fixed(1)) {
            if next != Some(*stride) {
                return false;
            }
            next = stride.product(*size);
        }
        true
    }

    /// Whether all axes before the last two can become one without a copy.
    pub(crate) fn has_one_batch(&self) -> bool {
        let Some(strides) = &self.strides else { return true };
        let mut inner: Option<(Amount, Amount)> = None;
        for (size, stride) in self.sizes.iter().copied().zip(strides.iter().copied()).rev().skip(2)
        {
            if inner.is_some_and(|(size, of)| of.product(size) != Some(stride)) {
                return false;
            }
            inner = Some((size, stride));
        }
        true
    }

    /// An axis, counted from the last one; 1 if there is none.
    pub(crate) fn trailing_axis(&self, back: usize) -> Amount {
        self.sizes.iter().rev().nth(back).copied().unwrap_or(Amount::fixed(1))
    }

    /// Product of the axes from `first` on; `None` if it depends on the number of samples.
    pub(crate) fn inner(&self, first: usize) -> Option<u64> {
        let mut axes = self.sizes.iter().skip(first);
        axes.try_fold(1_u64, |product, size| match size.per_sample {
            0 => product.checked_mul(size.fixed),
            _ => None,
        })
    }
}

/// The shapes of a graph's values.
pub(crate) struct Shapes<'a> {
    of_value: &'a [Option<u32>],
    shapes: Vec<Option<TensorShape>>,
}

impl<'a> Shapes<'a> {
    /// Images have sides of `image_side` pixels where the export left them open; other open sizes are those of the
    /// example with which the program was exported.
    pub(crate) fn new(graph: &'a Graph, image_side: Option<u64>) -> Self {
        let symbols = symbols(graph, image_side);
        let metas = graph.tensors.metas.iter();
        Self {
            of_value: &graph.tensors.of_value,
            shapes: metas.map(|meta| TensorShape::new(meta, &symbols)).collect(),
        }
    }

    /// `None` for numbers, and for tensors of which a size is not known.
    pub(crate) fn get(&self, value: ValueId) -> Option<&TensorShape> {
        let index = (*self.of_value.get(value.0 as usize)?)?;
        self.shapes.get(index as usize)?.as_ref()
    }
}

/// The symbols of the inputs' sizes: the number of samples, and what else the export left open.
fn symbols(graph: &Graph, image_side: Option<u64>) -> Symbols {
    let mut symbols = Symbols::new();
    for (value, _) in
        graph.inputs.iter().filter(|(_, source)| matches!(source, InputSource::Input(_)))
    {
        let Some(meta) = graph.tensors.get(*value) else { continue };
        let is_image = meta.sizes.len() == 4;
        for (axis, size) in meta.sizes.iter().enumerate() {
            let JsonSize::AsExpr(expression) = size else { continue };
            let side = image_side.filter(|_| is_image && axis >= 2);
            let side = side.and_then(|side| i64::try_from(side).ok());
            let value = match (axis, side, &expression.hint) {
                (0, ..) => LinearSize::SAMPLES,
                (_, Some(side), _) => LinearSize::fixed(side),
                (_, None, Some(Hint::AsInt(hint))) => LinearSize::fixed(*hint),
                _ => continue,
            };
            symbols.insert(symbol(&expression.expr_str).to_owned(), value);
        }
    }
    symbols
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A shape in which 0 is the number of samples; strides may be multiples of it.
    fn shape(sizes: &[u64], strides: &[u64]) -> TensorShape {
        let size = |size: &u64| match size {
            0 => Amount { fixed: 0, per_sample: 1 },
            size => Amount::fixed(*size),
        };
        let sizes: Vec<Amount> = sizes.iter().map(size).collect();
        let len = sizes.iter().try_fold(Amount::fixed(1), |len, size| len.product(*size));
        let strides = strides.iter().map(|stride| Amount::fixed(*stride)).collect();
        TensorShape { dtype: Dtype::F32, sizes, strides: Some(strides), len: len.unwrap() }
    }

    #[test]
    fn a_tensor_is_contiguous_if_each_stride_is_the_product_of_what_follows() {
        assert!(shape(&[0, 3, 4], &[12, 4, 1]).is_contiguous());
        // The stride of an axis of one element does not matter.
        assert!(shape(&[0, 1, 4], &[4, 99, 1]).is_contiguous());
        assert!(!shape(&[0, 3, 4], &[12, 1, 3]).is_contiguous());
        assert!(!shape(&[0, 3, 4], &[24, 4, 1]).is_contiguous());
    }

    /// `matmul` copies factors whose batch axes it cannot make one.
    #[test]
    fn batch_axes_become_one_if_they_follow_each_other() {
        // Samples, heads, positions, values: in order, and as views of (samples, positions, heads, values).
        assert!(shape(&[0, 2, 5, 4], &[40, 20, 4, 1]).has_one_batch());
        assert!(shape(&[0, 2, 4, 5], &[40, 20, 1, 4]).has_one_batch());
        assert!(!shape(&[0, 2, 5, 4], &[40, 4, 8, 1]).has_one_batch());
        assert!(shape(&[0, 5, 4], &[99, 4, 1]).has_one_batch());
        assert!(shape(&[5, 4], &[4, 1]).has_one_batch());
    }

    #[test]
    fn inner_axes_that_grow_with_the_samples_have_no_product() {
        let shape = shape(&[3, 0, 4], &[1, 1, 1]);
        assert_eq!((shape.inner(2), shape.inner(1)), (Some(4), None));
        assert_eq!(
            (shape.trailing_axis(0), shape.trailing_axis(9)),
            (Amount::fixed(4), Amount::fixed(1))
        );
    }
}
