"""Checks of arguments, with objects that have the attributes of PyTorch's."""

import dataclasses
import math

import pytest
from baton import _arguments


@dataclasses.dataclass
class Tensor:
    shape: tuple
    dtype: str = "torch.float32"
    device: str = "cpu"
    requires_grad: bool = True
    address: int | None = None

    def numel(self):
        return math.prod(self.shape)

    def stride(self):
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def element_size(self):
        return 4

    def data_ptr(self):
        return id(self) << 32 if self.address is None else self.address


class Model:
    def __init__(self, **parameters):
        self.parameters = parameters

    def forward(self, x, mask=None):
        pass

    def named_parameters(self):
        return self.parameters.items()

    def named_buffers(self):
        return []


def inputs(example, model=None):
    return _arguments.inputs(model or Model(), example, Tensor)


def test_the_three_forms_of_an_example_have_the_names_of_forward():
    x, mask = Tensor((2, 3)), Tensor((2, 1))
    assert inputs(x).named() == {"x": x}
    assert inputs((x, mask)).named() == {"x": x, "mask": mask}
    assert inputs({"mask": mask, "x": x}).named() == {"x": x, "mask": mask}
    # In the order of forward, which the file has too.
    assert list(inputs({"mask": mask, "x": x}).kwargs) == ["x", "mask"]


def test_inputs_of_a_list_of_arguments_are_numbered():
    class Many(Model):
        def forward(self, *parts, **named):
            pass

    part = Tensor((2,))
    assert list(inputs((part, part), Many()).named()) == ["parts.0", "parts.1"]
    assert list(inputs({"a": part}, Many()).named()) == ["named.a"]
    assert inputs((part, part), Many()).like("open") == {"parts": ("open", "open")}


class Losses(Model):
    def forward(self, age, target=None, image=None):
        pass


def test_the_images_are_the_main_input_or_else_the_first():
    image, values, target = Tensor((2, 3, 8, 8)), Tensor((2, 1)), Tensor((2,))
    given = inputs({"image": image, "age": values, "target": target}, Losses())
    assert (given.main("loss"), given.extra_fields("loss")) == ("image", ["age"])
    given = inputs((values, target, values), Losses())
    assert (given.main("loss"), given.extra_fields("loss")) == ("age", ["image"])
    given = inputs(values)
    assert (given.main("classification"), given.extra_fields("classification")) == ("x", [])


def test_inputs_and_target_are_put_together_by_name():
    one, two, target = (Tensor((2, size)) for size in range(3))
    expected = {"age": one, "image": two, "target": target}
    for given in ((one, two), [one, two], {"image": two, "age": one}):
        assert _arguments.with_target(Losses(), given, target) == expected
    assert _arguments.with_target(Losses(), one, target) == {"age": one, "target": target}
    with pytest.raises(ValueError, match=r"batch has 3 inputs, but Losses\.forward takes 2 and the target"):
        _arguments.with_target(Losses(), (one, two, one), target)


@pytest.mark.parametrize(
    ("example", "task", "message"),
    [
        (
            {"age": Tensor((2,))},
            "loss",
            "example has no target: with task='loss', Losses.forward must have an argument",
        ),
        ({"age": Tensor((2,)), "target": Tensor((2,))}, "regression", "an input target, but a regression takes none"),
    ],
)
def test_only_a_loss_has_a_target(example, task, message):
    with pytest.raises(ValueError) as caught:
        _arguments.target_input(Losses(), inputs(example, Losses()), task)
    assert message in str(caught.value)


def test_a_loss_of_the_target_alone_is_refused():
    class Alone(Model):
        def forward(self, target):
            pass

    target = inputs(Tensor((2,)), Alone())
    with pytest.raises(ValueError, match="example has only the target: the model must take another input too"):
        _arguments.target_input(Alone(), target, "loss")


@pytest.mark.parametrize(
    ("example", "error", "message"),
    [
        (3, TypeError, "example is of type int: give a tensor, a tuple of tensors, or a dict of named tensors"),
        ((), ValueError, "example is empty"),
        ((Tensor((2,)), None), TypeError, "example contains a value of type NoneType: all inputs must be tensors"),
        ({"y": Tensor((2,))}, ValueError, "example does not fit Model.forward: missing a required argument: 'x'"),
    ],
)
def test_an_example_that_is_no_batch_is_refused(example, error, message):
    with pytest.raises(error) as caught:
        inputs(example)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("example", "max_samples", "message"),
    [
        (Tensor((1, 3)), 8, "example has 1 sample, and torch.export would fix that number: give at least 2"),
        (Tensor((9, 3)), 8, "example has 9 samples, more than max_samples = 8: raise max_samples"),
        (Tensor(()), 8, "x is a single number: the first axis must count samples"),
        ((Tensor((2,)), Tensor((3,))), 8, "different numbers of samples (x has 2, mask has 3)"),
        (Tensor((2, 3)), 1, "max_samples is 1: it must be an integer of at least 2"),
    ],
)
def test_a_number_of_samples_that_cannot_be_left_open_is_refused(example, max_samples, message):
    with pytest.raises(ValueError) as caught:
        _arguments.samples(inputs(example), max_samples)
    assert message in str(caught.value)


def test_parameters_must_be_float32_with_values():
    _arguments.module(Model(weight=Tensor((2,))))
    for tensor, remedy in [
        (
            Tensor((2,), dtype="torch.bfloat16"),
            "weight is bfloat16, but Baton's master weights are float32: call model",
        ),
        (Tensor((2,), device="meta"), "weight is on the meta device and has no values: load the weights first"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            _arguments.module(Model(weight=tensor))


def test_a_model_without_a_parameter_to_train_is_refused():
    frozen = Tensor((2,), requires_grad=False)
    _arguments.module(Model(weight=frozen, head=Tensor((2,))))
    for model in [Model(), Model(weight=frozen)]:
        with pytest.raises(ValueError, match="Model has no parameter to train: set requires_grad"):
            _arguments.module(model)


def test_two_parameters_in_the_same_memory_are_refused_and_neighbours_are_not():
    first = Tensor((4, 6), address=4096)
    _arguments.module(Model(first=first, behind=Tensor((2,), address=4096 + 4 * 24), empty=Tensor((0,), address=4096)))
    for shape, address in [((4, 6), 4096), ((2,), 4096 + 4 * 23)]:
        with pytest.raises(ValueError, match="first and second are two objects with the same memory"):
            _arguments.module(Model(second=Tensor(shape, address=address), first=first))


def test_a_parameter_with_a_hook_is_refused():
    weight = Tensor((2,))
    weight._backward_hooks = {0: print}
    with pytest.raises(ValueError, match="parameter weight has a hook that may change its gradient"):
        _arguments.module(Model(weight=weight))


def test_a_lazy_parameter_is_refused():
    class UninitializedParameter:
        pass

    with pytest.raises(ValueError, match="weight has no shape yet: call the model once with a batch"):
        _arguments.module(Model(weight=UninitializedParameter()))


def test_a_wrapped_model_is_refused_with_the_name_of_the_inner_one():
    class DataParallel(Model):
        pass

    class RecursiveScriptModule(Model):
        pass

    with pytest.raises(TypeError, match=r"wrapped in DataParallel: give model\.module"):
        _arguments.module(DataParallel())
    with pytest.raises(TypeError, match=r"is a TorchScript module: give the nn\.Module"):
        _arguments.module(RecursiveScriptModule())


def test_model_and_example_must_be_on_one_device():
    on_gpu = Tensor((2, 3), device="cuda:0")
    _arguments.devices(Model(weight=on_gpu), inputs(on_gpu))
    _arguments.devices(Model(), inputs(on_gpu))
    with pytest.raises(ValueError, match=r"x is on cpu, but the model on cuda:0: move it with \.to\('cuda:0'\)"):
        _arguments.devices(Model(weight=on_gpu), inputs(Tensor((2, 3))))
    with pytest.raises(ValueError, match=r"several devices \(a on cuda:0, b on cpu\): move it to one"):
        _arguments.devices(Model(a=on_gpu, b=Tensor((2,))), inputs(on_gpu))


def test_classes_are_a_number_or_names():
    assert _arguments.class_names(None, "regression") == (None, [])
    assert _arguments.class_names(10, "classification") == (10, [])
    assert _arguments.class_names(("cat", "Löwe"), "classification") == (2, ["cat", "Löwe"])


@pytest.mark.parametrize(
    ("classes", "task", "message"),
    [
        (1, "classification", "classes are 1: a classification has at least 2"),
        (["a"], "classification", "classes are 1: a classification has at least 2"),
        ("ab", "classification", "classes is of type str: give their number, or a list of their names"),
        (True, "classification", "classes is of type bool"),
        (["a", 2], "classification", "class name 2 is of type int: names are strings"),
        (["a", "b\n"], "classification", "class name 'b\\n' is empty or cannot be printed"),
        (["a", " "], "classification", "class name ' ' is empty"),
        (["a", "b", "a"], "classification", "class name 'a' occurs 2 times: each class needs its own"),
        (3, "regression", "classes are given for a regression"),
        (3, "loss", "classes are given for a loss"),
    ],
)
def test_classes_that_cannot_be_kept_are_refused(classes, task, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        _arguments.class_names(classes, task)
    assert message in str(caught.value)


def test_normalisation_is_in_the_unit_of_recipes():
    images = inputs(Tensor((2, 3, 8, 8)))
    assert _arguments.normalisation(None, None, images) is None
    assert _arguments.normalisation((1, 2, 3), [58.395, 57.12, 57.375], images) == (
        [1.0, 2.0, 3.0],
        [58.395, 57.12, 57.375],
    )
    # Pixels as they are.
    assert _arguments.normalisation([0] * 3, [1] * 3, images) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.parametrize(
    ("mean", "std", "shape", "message"),
    [
        ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225], (2, 3, 8, 8), "in units of 0..255"),
        ([1, 2, 3], None, (2, 3, 8, 8), "mean and std go together"),
        ([1, 2, 3], [1, 2, 3], (2, 12, 100), "are for images of shape (samples, 3, height, width)"),
        ([1, 2, 3], [1, 2, 3], (2, 1, 28, 28), "but the input is (2, 1, 28, 28)"),
        (128, 64, (2, 3, 8, 8), "mean is 128: give three numbers, one per channel"),
        ([1, 2], [1, 2], (2, 3, 8, 8), "give three finite numbers"),
        ([1, 2, float("nan")], [1, 2, 3], (2, 3, 8, 8), "give three finite numbers"),
        ([1, 2, 3], [1, 2, 0], (2, 3, 8, 8), "each must be above 0"),
    ],
)
def test_a_normalisation_that_a_recipe_cannot_have_is_refused(mean, std, shape, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        _arguments.normalisation(mean, std, inputs(Tensor(shape)))
    assert message in str(caught.value)


def test_the_file_must_be_a_pt2_in_a_folder_that_exists(tmp_path):
    assert _arguments.target(str(tmp_path / "net.pt2")) == tmp_path / "net.pt2"
    with pytest.raises(ValueError, match=r"its name must end with \.pt2"):
        _arguments.target(tmp_path / "net.pth")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere: create it first"):
        _arguments.target(tmp_path / "nowhere" / "net.pt2")
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(IsADirectoryError, match="is a folder"):
        _arguments.target(tmp_path / "folder.pt2")


def test_an_unknown_task_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="task is 'detection': it must be 'classification', 'regression' or 'loss'"):
        _arguments.task("detection")
